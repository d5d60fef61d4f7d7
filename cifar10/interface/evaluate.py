"""Scores a run from a Python program, like `eval.py` but without writing files."""

from pathlib import Path
from typing import Any

from cifar10.config import data_flag, fields, layout
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, say
from cifar10.input.records import SPLITS, Split
from cifar10.interface.train import Record, register_model
from cifar10.models.registry import PYTHON
from cifar10.process import entry_point
from cifar10.process.signals import StopSignals


def evaluate(
    run: Record | str | Path,
    *,
    data: Any = None,
    model: Any = None,
    split: Split = "test",
    step: int | str | None = None,
    num_examples: int | None = None,
    use_averages: bool = True,
    test_time_augmentation: bool = False,
) -> dict[str, float]:
    """Scores a checkpoint of a run on every image of a split, exactly once.

    Args:
        run: The `Record` that `train` returned, or the run's directory.
        data: The images to score, in the forms that `Config` takes. Arrays (x, y) count
            as the split that `split` names, and another folder without splits as the
            test split. None for the data of the run.
        model: The function that builds the model, if `run` is a directory and the
            function cannot be imported.
        split: `test`, `train`, or `val` if the data has that split.
        step: The checkpoint's step, or `best` by score; None for the newest checkpoint.
        num_examples: The number of images to score, from the first on; None for all.
        use_averages: Whether to score the moving averages, not the last values.
        test_time_augmentation: Whether to average over six views of each image.

    Returns:
        The metrics by name, such as `precision @ 1`, like those of `eval.py --json`.

    Raises:
        UsageError: There is no such checkpoint, or the data does not fit the run.

    Example:
        >>> x, y = np.zeros([64, 32, 32, 3], np.uint8), np.arange(64) % 2
        >>> record = train(Config(data=(x, y), max_steps=4, batch_size=8))
        Towers: ...
        >>> metrics = evaluate(record, data=(x[:16], y[:16]))
        >>> metrics["step"], 0 <= metrics["precision @ 1"] <= 1
        (4, True)
    """
    if split not in SPLITS:
        raise UsageError(f"evaluate: split={split!r}: give {' or '.join(SPLITS)}.")
    entry_point.import_tensorflow(stop=StopSignals())
    # These modules import TensorFlow, whose environment is set above.
    import tensorflow as tf

    from cifar10.evaluation.eval_options import Options
    from cifar10.evaluation.scored_set import ScoredSet
    from cifar10.input import datasets
    from cifar10.interface.data import as_dataset
    from cifar10.towers import devices
    from cifar10.trained_model import TrainedModel

    scoring = Options(
        eval_data="train_eval" if split == "train" else split,
        num_examples=num_examples,
        use_averages=use_averages,
        test_time_augmentation=test_time_augmentation,
    )
    dataset, trusted, own_metrics = as_dataset(data, split), None, None
    if isinstance(run, Record):
        directory, trusted = run.train_dir, run.config.network.model
        register_model(run.config)
        own_metrics = run.config.loss.metrics
        if data is None:
            dataset = as_dataset(run.config.data_objects)
    else:
        directory = layout.absolute_path(str(run))
    if model is not None:
        built = run.config.model_function if isinstance(run, Record) else None
        if built not in (None, model):
            raise UsageError(f"evaluate: model={model}: the run has {built}. Omit it.")
        own = Config(model=model)
        trusted = own.network.model
        register_model(own)
    # The first GPU, with memory that grows as needed, or else the CPU.
    devices.let_memory_grow(tf.config.list_physical_devices("GPU"))
    device = "/gpu:0" if tf.config.list_logical_devices("GPU") else "/cpu:0"
    how: dict[str, Any] = {"use_averages": use_averages, "trust_model": trusted}
    trained = TrainedModel(directory, device, **how)
    found_step = trained.restore(step)
    known = trained.run.config.network.model
    names = trusted, PYTHON + f"{trusted}".partition(":")[2]  # With and without module.
    if model is not None and known not in names:
        raise UsageError(f"evaluate: model={model}: the run has {known}. Omit it.")
    if dataset is None and data is None:
        dataset = datasets.find_again(trained.run)
    else:
        dataset = _dataset_to_score(trained.run, data, dataset, split)
    dataset = datasets.fitted(dataset, trained.run, "data")
    if not datasets.is_of_run(dataset, trained.run):
        datasets.say_seen(dataset, trained.run, split, num_examples)
    given = trained.model, trained.run.config, dataset, scoring
    scored = ScoredSet(*given, own_metrics=own_metrics)
    result = scored.score(trained.trainable, device, trained.temperature)
    return {"step": found_step, **result.scalars}


def _dataset_to_score(run: RecordedRun, data: Any, given: Any, split: Split) -> Any:
    """Returns the data set to score a run on: `given`, or the one that `data` names."""
    from cifar10.input import datasets
    from cifar10.input.pictures.listing import split_of

    wanted = vars(run.config.dataset) | {"data_dir": None, "max_bad_images": 1.0}
    wanted |= {"corrections": None} if data is not None or split != "train" else {}
    if given is None:
        wanted |= data_flag.located({"data": str(data)})
    if data is not None and split == "train":  # Scores all of the given images.
        wanted["val_fraction"] = 0.0
    wanted["image_size"] = datasets.describe(run)[0][0]  # Of a folder's pictures.
    group = fields.unchecked(fields.Dataset, wanted)
    may_be_whole = given is None and split == "test" and group.data == data_flag.FOLDER
    try:
        found = datasets.find_for(group, given, run=run)
    except UsageError:  # It cannot be divided, as a folder with a single class.
        if not may_be_whole:
            raise
        whole = datasets.find_for(group, run=run, whole=True)
        tops = {path.partition("/")[0] for path in whole.paths["test"]}
        if any(map(split_of, tops)) or datasets.has_training_images(whole, run):
            raise
    else:
        is_all = datasets.is_of_run(found, run) or not (may_be_whole and found.division)
        if is_all or datasets.has_training_images(found, run):
            return found
        whole = datasets.find_for(group, run=run, whole=True, say_notes=False)
    say(f"Note: {whole.directory} has no splits: all its pictures are scored.")
    return whole
