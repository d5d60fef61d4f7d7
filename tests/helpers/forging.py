"""Helpers: forges a run as somebody would who has the package's code."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np

from cifar10.config import run_config
from cifar10.run_directory import checkpoints
from cifar10.training.replay import Replay


def folder_of(run, step):
    return checkpoints.folder(run / "checkpoints", step)


def manifest_of(run, step):
    manifest = json.loads((folder_of(run, step) / "manifest.json").read_text())
    return {name: of for name, of in manifest.items() if name != "sha256"}


def write_manifest(run, step, manifest):
    digest = checkpoints.digest_of(manifest)
    written = json.dumps({**manifest, "sha256": digest})
    (folder_of(run, step) / "manifest.json").write_text(written)


def edit(path, change):
    """Applies a change to the lines of a log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in change(lines)))


def edit_config(run, **changes):
    """Changes config.json, which counts as this user's own afterwards."""
    path = run / "config.json"
    content = json.dumps(json.loads(path.read_text()) | changes).encode()
    path.write_bytes(content)
    run_config.mark_as_own(content)


def forge(run):
    """Writes all digests and links anew, so that the chain fits what is there."""
    config = json.loads((run / "config.json").read_text())
    for step in checkpoints.steps(run / "checkpoints"):
        manifest, states = manifest_of(run, step), folder_of(run, step).glob("state*")
        manifest["files"] = {path.name: checkpoints._sums(path) for path in states}
        if settings := manifest.get("chain", {}).get("settings"):
            settings = {name: config.get(name, of) for name, of in settings.items()}
            link = checkpoints.make_link(run / "checkpoints", step, settings)
            manifest["chain"] = link
        write_manifest(run, step, manifest)


def change_tensors(run, step, change):
    """Applies `change` to the state of a checkpoint, and writes it back."""
    replayed = Replay(run)
    replayed._restore(step)
    change(replayed._state)
    trackables = replayed._state.trackables()
    written = checkpoints.save(run, trackables, step=step, facts={})
    for path in written.glob("state*"):
        shutil.copy(path, folder_of(run, step))
    shutil.rmtree(written)


def _leaves(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        if isinstance(one, dict | list) and one:
            yield from _leaves(one, (*path, key))
        else:
            yield (*path, key)


# Values of any type, which a reader may stumble over.
_ODD = (None, "x", True, [1], {"a": 1}, -1, 1e300, float("nan"), 2**62, 10**400)


def _other(value, random, *, odd=False):
    """Another value of the same kind or, if `odd`, of any, as a forger would choose.

    An odd number is far from the value, so that no rounding explains it.
    """
    if odd:
        if random.random() < 0.5:
            return random.choice([one for one in _ODD if one is not value])
        if isinstance(value, float):
            return random.choice([-9.0, 1e4]) * (value or 1.0)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + random.choice([1, -1, 7])
    if isinstance(value, float):
        changed = value * random.choice([1.01, 0.5, 2.0]) + random.choice([0.0, 0.25])
        return changed if changed != value else value + 0.5
    if isinstance(value, str):
        return f"{value}x"
    return 3


def change_leaf(value, random, *, skip=(), odd=False):
    """Changes one leaf of a JSON value; returns it, and the leaf's first name."""
    value = copy.deepcopy(value)
    *path, key = random.choice([one for one in _leaves(value) if one[0] not in skip])
    holder = value
    for name in path:
        holder = holder[name]
    if isinstance(holder, dict) and random.random() < 0.2:
        del holder[key]
    else:
        holder[key] = _other(holder[key], random, odd=odd)
    return value, (*path, key)[0]


def change_at_random(run, random, *, odd=False):
    """Changes a number, name or file of a run; returns the file and the name.

    If `odd`, to any type, and numbers by more than rounding does.
    """
    steps = checkpoints.steps(run / "checkpoints")
    step = random.choice(steps)
    logs = [
        run / "metrics.jsonl",
        *run.glob("eval*/metrics.jsonl"),
        run / "starts.jsonl",
    ]
    kind = random.choice(["config", "manifest", "log", "log", "tensor", "file"])
    if kind == "config":
        config = json.loads((run / "config.json").read_text())
        changed, name = change_leaf(config, random, odd=odd)
        (run / "config.json").write_text("{}")
        edit_config(run, **changed)
        return "config.json", name
    if kind == "manifest":
        manifest = manifest_of(run, step)
        skip = ("files", "chain")  # Which the forger writes anew.
        changed, name = change_leaf(manifest, random, skip=skip, odd=odd)
        write_manifest(run, step, changed)
        return "manifest.json", name
    if kind == "log":
        path, names = random.choice(logs), []

        def change(lines):
            at = random.randrange(len(lines))
            if random.random() < 0.2:  # Twice, or of a step beyond or before all.
                step = lines[at]["step"] + 100
                if odd and random.random() < 0.5 and path.name != "starts.jsonl":
                    step = 0
                added = random.choice([lines[at], {**lines[at], "step": step}])
                names.append("twice" if added == lines[at] else "beyond")
                return [*lines, added]
            lines[at], name = change_leaf(lines[at], random, odd=odd)
            names.append(name)
            return lines

        edit(path, change)
        return str(path.relative_to(run)), names[0]
    if kind == "tensor":

        def change_one(state):
            one = random.choice(state.variables())
            value = np.array(one.numpy())
            flat = value.reshape(-1)
            flat[random.randrange(flat.size)] += 1
            one.assign(value * 100 + 9 if odd else value)

        change_tensors(run, step, change_one)
        return "state", step
    added = random.choice(["between", "beyond", "temperature"])
    if added == "temperature":
        (folder_of(run, step) / "temperature.txt").write_text("3.0\n")
        return "temperature.txt", step
    new = step + (1 if added == "between" else 1000)
    new = 0 if odd and random.random() < 0.3 else new
    shutil.copytree(folder_of(run, step), folder_of(run, new))
    write_manifest(run, new, manifest_of(run, new) | {"step": new})
    return "checkpoints", new


def copied(run, folder):
    return Path(shutil.copytree(run, folder))
