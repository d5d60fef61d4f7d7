"""Model cards of exports, as Hugging Face's own library reads them."""

import json
import re
import shutil

import numpy as np
import pytest

from cifar10.config import run_config
from cifar10.errors import UsageError
from cifar10.input import synthetic
from cifar10.run_directory import scores
from cifar10.tools import exported, model_card
from small_exports import export
from small_runs import describe, save, small

SCORES = {"precision @ 1": 0.75, "precision @ 5": 0.9, "macro F1": 0.7}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, stand_in_dir):
    """A run with scores on the test part at step 20, and none at step 10."""
    run_dir = tmp_path_factory.mktemp("cards") / "run"
    given = {"data_dir": str(stand_in_dir), "versions": {"keras": "3.15.1"}}
    describe(run_dir, model=f"{small.__module__}:small", **given, class_names=NAMES)
    run_config.mark_as_own((run_dir / "config.json").read_bytes())
    for step in (10, 20):
        save(run_dir, step, model=f"{small.__module__}:small")
    (run_dir / "eval").mkdir()
    scores.append(run_dir / "eval", 20, SCORES | {"balanced accuracy": "x"}, 2000)
    return run_dir


FORMATS = {
    "keras": (".keras", "keras"),
    "savedmodel": ("", "tensorflow"),
    "onnx": (".onnx", "onnx"),
    "litert": (".tflite", "tflite"),
}
NAMES = list(synthetic.CLASS_NAMES)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_card_is_what_the_hub_reads_and_its_code_runs(run_dir, tmp_path, kind):
    hub = pytest.importorskip("huggingface_hub")
    suffix, library = FORMATS[kind]
    output = tmp_path / f"it's: # no\"YAML{suffix}"
    assert export(run_dir, output, model_card=True) == 0
    folder = output if kind == "savedmodel" else tmp_path
    card = hub.ModelCard.load(folder / "README.md")
    assert not re.search(f"{run_dir.parent}|{tmp_path}", card.content)
    assert card.data.model_name == output.name
    assert card.data.library_name == library
    assert card.data.license == "unknown"
    found = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert found == {"accuracy": 0.75, "top_5_accuracy": 0.9, "f1": 0.7}
    assert {one.dataset_split for one in card.data.eval_results} == {"test"}
    # Wilson's interval of 1,500 of 2,000.
    assert "0.7306 to 0.7685" in card.text
    described = json.loads(re.search(r"```json\n(.*?)\n```", card.text, re.DOTALL)[1])
    assert described["class_names"] == NAMES
    assert described["training"]["versions"] == {"keras": "3.15.1"}
    images = np.random.default_rng(0).normal(size=(3, 24, 24, 3)).astype(np.float32)
    code = re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1]
    variables = {"images": images}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, variables)  # noqa: S102 - as a user does.
    logits = exported.compute_in_another_process(output, kind, images)
    np.testing.assert_allclose(variables["outputs"], logits, rtol=1e-4, atol=1e-5)


def test_a_card_says_if_the_test_part_may_have_chosen_the_step(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    given = {"step": 20, "use_averages": True}
    assert "too good" in model_card.build(run, "it", "keras", given)
    path = run / "config.json"
    parts = {"data_parts": ["train", "val", "test"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    assert "too good" not in model_card.build(run, "it", "keras", given)


def test_without_a_score_or_in_place_of_a_readme_no_card_is_written(run_dir, tmp_path):
    output = tmp_path / "it.keras"
    with pytest.raises(UsageError, match=r"eval.*--step 10"):
        export(run_dir, output, step="10", model_card=True)
    with pytest.raises(UsageError, match="no-use_averages"):
        export(run_dir, output, use_averages=False, model_card=True)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UsageError, match="README"):
        export(run_dir, output, model_card=True)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"
