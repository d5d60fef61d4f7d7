"""Records a run in wandb (Weights & Biases) or Trackio, across resumes.

python examples/09_trackers.py [STEPS] [wandb | trackio]

WANDB_MODE=offline needs no account; `wandb sync` uploads such a record later. Trackio
has wandb's interface, and keeps its records on this machine; `trackio show` shows them.
Trackio 0.43 asks for Pillow below 13, but runs with Pillow 13, which this package
needs: pip install trackio, then pip install "pillow>=13".
"""

import importlib
import math
import secrets
import sys

from cifar10 import Config, train


class Tracker:
    """Sends settings, curves and scores to wandb or trackio, a module."""

    def __init__(self, module, project):
        self._module = module
        self._project = project
        self._started = False

    def on_start(self, run):
        if self._started:  # Continues after a rollback.
            return
        noted = run.train_dir / f"{self._module.__name__}_run"
        if not noted.exists():
            noted.write_text(f"{run.train_dir.name}-{secrets.token_hex(4)}")
        name = noted.read_text()
        names = ("model", "data", "optimizer", "learning_rate", "global_batch_size")
        self._module.init(
            project=self._project,
            name=name,
            config={name: run.settings[name] for name in names},
            resume="allow",
            # Trackio knows a run by its name, wandb by its id.
            **({"id": name} if self._module.__name__ == "wandb" else {}),
        )
        self._started = True

    def on_log(self, step, metrics):
        self._send(step, metrics, "train")

    def on_evaluation(self, step, metrics):
        self._send(step, metrics, "test")

    def _send(self, step, metrics, part):
        # NaN stands for a rate that was not measured.
        named = {f"{part}/{k}": v for k, v in metrics.items() if math.isfinite(v)}
        self._module.log(named, step=step)

    def on_end(self, step, why):
        self._module.finish()


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 1_000
    module = importlib.import_module(sys.argv[2] if sys.argv[2:] else "wandb")
    train(
        Config(max_steps=steps, eval_steps=min(steps, 250), train_dir="runs/tracked"),
        hooks=[Tracker(module, "cifar10")],
    )


if __name__ == "__main__":
    main()
