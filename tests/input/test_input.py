"""Inputs: which image comes when, for every split into towers and from any step."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.config import DISTORTIONS
from cifar10.errors import UsageError
from cifar10.input import evaluation, on_device, pipeline
from small_sets import OnDisk

COUNT = 103
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 32, 32, 3), np.uint8)
# Each image's label is its number, so that batches tell which images they hold.
NUMBERS = np.arange(COUNT, dtype=np.int32)


def training_batches(
    *,
    batch_size,
    towers=1,
    seed=5,
    start_step=0,
    distortion="none",
    images=None,
    **options,
):
    return pipeline.training_batches(
        IMAGES if images is None else images,
        NUMBERS,
        batch_size=batch_size,
        towers=towers,
        distortion=distortion,
        seed=seed,
        start_step=start_step,
        **options,
    )


def stream(steps, **options):
    """The numbers of the images that the first steps show, towers in order."""
    return np.concatenate(
        [
            labels.numpy()
            for tower_batches in training_batches(**options).take(steps)
            for _, labels in tower_batches
        ]
    )


def central_crops(images):
    """The oracle of what a model of crops is scored on, one image at a time."""
    return [tf.image.per_image_standardization(i[4:28, 4:28]) for i in images]


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- order


def test_every_epoch_shows_every_image_once_across_the_borders_of_batches():
    shown = stream(31, batch_size=10)
    for epoch in range(3):
        images = shown[epoch * COUNT : (epoch + 1) * COUNT]
        np.testing.assert_array_equal(np.sort(images), NUMBERS)


def test_a_batch_larger_than_the_set_holds_several_epochs():
    shown = stream(2, batch_size=COUNT, towers=2)
    for images in np.split(shown, 4):
        np.testing.assert_array_equal(np.sort(images), NUMBERS)


def test_order_differs_between_epochs_and_between_seeds():
    first, second = np.split(stream(2, batch_size=COUNT), 2)
    other = stream(1, batch_size=COUNT, seed=6)
    # Two random orders of 103 images agree in one place on average.
    for one, another in (
        (first, second),
        (first, other),
        (second, other),
        (first, NUMBERS),
    ):
        assert np.sum(one == another) < 10


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_the_least_and_the_largest_seed_visit_every_image(seed):
    shown = stream(2, batch_size=COUNT, seed=seed)
    for images in np.split(shown, 2):
        np.testing.assert_array_equal(np.sort(images), NUMBERS)


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        (103, 0),
        (103, 1),
        (103, 2**31 - 1),
        (1000, 0),
        (1000, 1),
        (50_000, 0),
        (50_000, 1),
    ],
)
def test_order_is_as_random_as_it_looks(count, seed):
    """No place, and no image before, tells which image comes.

    The bounds are five deviations of a random order: correlations have the deviation
    1 / sqrt(count), and about one image stands in any given place.
    """
    epochs = [
        pipeline.shuffled_indices(
            tf.range(epoch * count, (epoch + 1) * count, dtype=tf.int64), count, seed
        ).numpy()
        for epoch in range(3)
    ]
    bound = 5 / np.sqrt(count)
    for number, order in enumerate(epochs):
        following = epochs[(number + 1) % 3]
        assert np.sum(order == np.arange(count)) < 10
        assert np.sum(order == following) < 10
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < bound
        assert abs(np.corrcoef(order, following)[0, 1]) < bound
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < bound


def test_order_depends_on_seed_and_epoch_and_not_on_the_batch_size():
    by_10 = stream(31, batch_size=10)[: 3 * COUNT]
    np.testing.assert_array_equal(by_10, stream(3, batch_size=COUNT))
    np.testing.assert_array_equal(by_10, stream(45, batch_size=7)[: 3 * COUNT])


# ---- batches


def test_images_and_labels_belong_together():
    for batch in training_batches(batch_size=4, towers=3).take(3):
        for images, labels in batch:
            assert (images.shape, images.dtype) == ((4, 32, 32, 3), tf.float32)
            assert (labels.shape, labels.dtype) == ((4,), tf.int64)
            # Mean and deviation of CIFAR-10's channels.
            chosen = IMAGES[labels.numpy()] / 255 - (0.4914, 0.4822, 0.4465)
            expected = chosen / (0.2470, 0.2435, 0.2616)
            np.testing.assert_allclose(images, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("towers", "workers"),
    [(2, 1), (4, 1), (8, 1), (4, 2), (2, 3), (1, 4)],
)
def test_global_batches_do_not_depend_on_towers_and_workers(towers, workers):
    """Images are equal bit for bit, though all distortions are on."""
    whole = training_batches(batch_size=24, distortion="tutorial")
    of_workers = [
        training_batches(
            batch_size=24 // workers // towers,
            towers=towers,
            shard=(index, workers),
            distortion="tutorial",
        ).take(5)
        for index in range(workers)
    ]
    for ((images, labels),), *split in zip(whole.take(5), *of_workers, strict=True):
        assert [len(batches) for batches in split] == [towers] * workers
        parts = [part for batches in split for part in batches]
        np.testing.assert_array_equal(tf.concat([part[0] for part in parts], 0), images)
        np.testing.assert_array_equal(tf.concat([part[1] for part in parts], 0), labels)


@pytest.mark.parametrize("on_devices", [False, True])
def test_workers_share_out_each_global_batch_in_order(four_cpus, on_devices):
    """Three workers of two towers each make what one tower makes, part by part."""
    options = {"batch_size": 2, "distortion": "tutorial", "seed": 5, "start_step": 7}
    workers = []
    for worker in range(3):
        order = {**options, "shard": (worker, 3)}
        if on_devices:
            of_two = on_device.device_batches(IMAGES, NUMBERS, four_cpus[:2], **order)
        else:
            of_two = pipeline.training_batches(IMAGES, NUMBERS, towers=2, **order)
        workers.append(iter(of_two))
    whole = training_batches(batch_size=12, distortion="tutorial", start_step=7)
    for ((images, labels),) in whole.take(4):
        parts = [part for worker in workers for part in next(worker)]
        np.testing.assert_array_equal(tf.concat([part[1] for part in parts], 0), labels)
        np.testing.assert_array_equal(tf.concat([part[0] for part in parts], 0), images)


@pytest.mark.parametrize("start_step", [1, 8, 9, 25])
def test_starting_at_a_step_skips_the_earlier_ones(start_step):
    """Steps 8 and 17 hold images of two epochs."""
    options = {"batch_size": 6, "towers": 2, "distortion": "tutorial"}
    from_there = training_batches(**options, start_step=start_step).take(3)
    skipped = training_batches(**options).skip(start_step).take(3)
    for batches, expected in zip(from_there, skipped, strict=True):
        for tower in range(2):
            np.testing.assert_array_equal(batches[tower][0], expected[tower][0])
            np.testing.assert_array_equal(batches[tower][1], expected[tower][1])


@pytest.mark.parametrize("changed", [{"start_step": 1}, {"seed": 6}])
def test_distortions_differ_between_steps_and_between_seeds(monkeypatch, changed):
    """A set of one image tells the distortions from the order."""
    monkeypatch.setattr(f"{__name__}.IMAGES", IMAGES[:1])
    monkeypatch.setattr(f"{__name__}.NUMBERS", NUMBERS[:1])

    def first(**options):
        batches = training_batches(batch_size=8, distortion="crop_flip", **options)
        ((images, labels),) = next(iter(batches))
        assert labels.numpy().tolist() == [0] * 8
        return images.numpy()

    assert not np.array_equal(first(), first(**changed))


# ---- queues


def numbered(towers, shape=()):
    """Endless batches: at step s tower t gets 10 s + t."""
    return tf.data.Dataset.range(2**62).map(
        lambda step: tuple((tf.fill(shape, 10 * step + t), step) for t in range(towers))
    )


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_every_tower_gets_its_own_batches_in_order_on_its_device(four_cpus, towers):
    with pipeline.PrefetchQueues(numbered(towers), four_cpus[:towers]) as queues:
        for step in range(2 * pipeline.QUEUE_CAPACITY + 3):
            batches = queues.get()
            assert [int(images) for images, _ in batches] == [
                10 * step + tower for tower in range(towers)
            ]
            assert [int(labels) for _, labels in batches] == [step] * towers
            for tower, tensors in enumerate(batches):
                for tensor in tensors:
                    assert tensor.device.endswith(f"CPU:{tower}")


def test_no_iterator_waits_for_the_thread_that_tunes_it():
    # It sleeps for longer, up to a minute, the longer a training runs.
    datasets = [
        training_batches(batch_size=8),
        evaluation.evaluation_batches(IMAGES, NUMBERS, 8),
    ]
    for dataset in datasets:
        assert dataset.options().autotune.enabled is False


def test_an_error_in_the_pipeline_is_raised_after_the_batches_before_it(four_cpus):
    def batch(step):
        tf.debugging.assert_none_equal(step, np.int64(2), message="step 2 is broken")
        return ((step, step), (step, step))

    batches = tf.data.Dataset.range(10).map(batch)
    with pipeline.PrefetchQueues(batches, four_cpus[:2]) as queues:
        for step in (0, 1):
            assert [int(images) for images, _ in queues.get()] == [step, step]
        with pytest.raises(tf.errors.InvalidArgumentError, match="step 2 is broken"):
            queues.get()


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]


@pytest.mark.parametrize("taken", [0, 1])
def test_close_ends_the_thread_though_the_queues_are_full(four_cpus, taken):
    assert not prefetch_threads()
    queues = pipeline.PrefetchQueues(numbered(2), four_cpus[:2])
    assert len(prefetch_threads()) == 1
    for _ in range(taken):
        queues.get()
    wait_for(lambda: all(tower_queue.full() for tower_queue in queues._queues))
    queues.close()
    assert not prefetch_threads()
    queues.close()  # A second time is harmless.


def test_the_thread_ends_when_the_training_raises(four_cpus):
    with (
        pytest.raises(ZeroDivisionError),
        pipeline.PrefetchQueues(numbered(1), four_cpus[:1]),
    ):
        raise ZeroDivisionError
    assert not prefetch_threads()


def test_the_thread_ends_after_an_error_that_nobody_takes(four_cpus):
    """Both queues are full, so the error itself waits for a place."""

    def batch(step):
        tf.debugging.assert_less(step, np.int64(pipeline.QUEUE_CAPACITY))
        return ((step, step), (step, step))

    batches = tf.data.Dataset.range(10).map(batch)
    queues = pipeline.PrefetchQueues(batches, four_cpus[:2])
    wait_for(lambda: all(tower_queue.full() for tower_queue in queues._queues))
    queues.close()
    assert not prefetch_threads()


def test_batches_are_prepared_no_further_ahead_than_the_queues_hold(four_cpus):
    prepared = []
    batches = tf.data.Dataset.range(1000).map(
        lambda step: ((tf.py_function(prepared.append, [step], []), step)[1:] * 2,)
    )
    with pipeline.PrefetchQueues(batches, four_cpus[:1]) as queues:
        wait_for(queues._queues[0].full)
        time.sleep(0.2)
        # Besides those in the queue one waits in the thread for a place.
        assert len(prepared) <= pipeline.QUEUE_CAPACITY + 1


# ---- evaluation


@pytest.mark.parametrize("batch_size", [1, 16, 37, 50])
def test_evaluation_shows_every_image_once_and_in_order(batch_size):
    images, numbers = IMAGES[:37], NUMBERS[:37]
    batches = list(evaluation.evaluation_batches(images, numbers, batch_size))
    assert len(batches) == -(-37 // batch_size)
    for crops, labels, mask in batches:
        assert (crops.shape, crops.dtype) == ((batch_size, 24, 24, 3), tf.float32)
        assert (labels.shape, labels.dtype) == ((batch_size,), tf.int32)
        assert (mask.shape, mask.dtype) == ((batch_size,), tf.bool)
    counted = [labels[mask].numpy() for _, labels, mask in batches]
    np.testing.assert_array_equal(np.concatenate(counted), numbers)
    counted = [crops[mask].numpy() for crops, _, mask in batches]
    np.testing.assert_allclose(
        np.concatenate(counted), central_crops(images), rtol=1e-4, atol=1e-5
    )


def test_the_last_evaluation_batch_is_filled_up_with_what_does_not_count():
    batches = list(evaluation.evaluation_batches(IMAGES[:37], NUMBERS[:37], 16))
    masks = [mask.numpy().tolist() for _, _, mask in batches]
    assert masks == [[True] * 16, [True] * 16, [True] * 5 + [False] * 11]
    crops, labels, _ = batches[-1]
    assert labels.numpy().tolist() == [32, 33, 34, 35] + [36] * 12
    assert np.isfinite(crops).all()


def test_evaluation_batches_can_be_gone_through_again():
    batches = evaluation.evaluation_batches(IMAGES[:5], NUMBERS[:5], 2)
    first, second = (
        [labels.numpy().tolist() for _, labels, _ in batches] for _ in range(2)
    )
    assert first == second == [[0, 1], [2, 3], [4, 4]]


# ---- images that are not in memory


def assert_equal(batches, expected):
    for made, other in zip(batches, expected, strict=True):
        for own, others in zip(made, other, strict=True):
            assert own[0].shape == others[0].shape
            np.testing.assert_array_equal(own[0], others[0])
            np.testing.assert_array_equal(own[1], others[1])


@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.parametrize("towers", [1, 4])
def test_images_on_a_disk_make_the_batches_of_those_in_memory(distortion, towers):
    """Step 8 holds images of two epochs."""
    options = {"batch_size": 12 // towers, "towers": towers, "start_step": 7}
    options["distortion"] = distortion
    mapped = training_batches(images=OnDisk(IMAGES), **options)
    assert mapped.element_spec == training_batches(**options).element_spec
    assert_equal(mapped.take(4), training_batches(**options).take(4))


def test_a_mapped_array_is_read_as_it_is_needed(tmp_path, monkeypatch):
    mapped = np.memmap(tmp_path / "images", np.uint8, "w+", shape=IMAGES.shape)
    mapped[:] = IMAGES
    options = {"batch_size": 6, "towers": 2, "distortion": "tutorial"}
    expected = training_batches(**options).take(3)
    constants = []
    made = tf.constant
    monkeypatch.setattr(
        tf,
        "constant",
        lambda value, *rest: constants.append(value) or made(value, *rest),
    )
    assert_equal(training_batches(images=mapped, **options).take(3), expected)
    assert not [value for value in constants if np.size(value) > COUNT]


def test_a_worker_reads_its_own_part_of_each_batch_alone():
    options = {"batch_size": 2, "towers": 2, "distortion": "tutorial"}
    whole = training_batches(**{**options, "towers": 4})
    workers = [OnDisk(IMAGES), OnDisk(IMAGES)]
    for index, images in enumerate(workers):
        batches = training_batches(images=images, shard=(index, 2), **options)
        first, last = 2 * index, 2 * index + 2
        expected = (towers[first:last] for towers in whole.take(5))
        assert_equal(batches.take(5), expected)
        shown = np.concatenate(
            [t[1] for towers in whole.take(5) for t in towers[first:last]]
        )
        read = [chosen.tolist() for chosen in images.chosen]
        assert all(part.tolist() in read for part in np.split(shown, 5))
        assert {len(part) for part in read} == {4}
        # Some batches are made ahead: two stages make two each, and as many wait.
        assert len(read) <= 5 + 2 * (2 + pipeline.QUEUE_CAPACITY)


def test_batches_of_a_disk_are_made_side_by_side_in_a_deterministic_run():
    """TensorFlow makes one after another of what has a state."""
    function = tf.function(lambda chosen: pipeline.take(OnDisk(IMAGES), chosen))
    traced = function.get_concrete_function(tf.TensorSpec([4], tf.int64))
    assert not [
        op.type for op in traced.graph.get_operations() if op.op_def.is_stateful
    ]
    np.testing.assert_array_equal(
        traced(tf.constant([7, 0, 7, 102], tf.int64)), IMAGES[[7, 0, 7, 102]]
    )


@pytest.mark.parametrize("count", [None, 30])
def test_an_evaluation_reads_each_image_of_a_disk_once(count):
    images = OnDisk(IMAGES[:37])
    options = {"batch_size": 16, "distortion": "flip_translate", "count": count}
    batches = evaluation.evaluation_batches(images, NUMBERS[:37], **options)
    expected = evaluation.evaluation_batches(IMAGES[:37], NUMBERS[:37], **options)
    for batch, others in zip(batches, expected, strict=True):
        for own, other in zip(batch, others, strict=True):
            np.testing.assert_array_equal(own, other)
    count = count or 37
    counts = images.count()
    assert (counts[: count - 1] == 1).all()
    assert counts[count - 1] == 1 + -count % 16  # The last batch is filled up with it.
    assert (counts[count:] == 0).all()


def test_what_is_not_in_memory_never_lies_on_a_gpu():
    assert on_device.fits(IMAGES, NUMBERS)
    assert not on_device.fits(OnDisk(IMAGES), NUMBERS)
    on_device.check("gpu", IMAGES)
    on_device.check("auto", OnDisk(IMAGES))
    with pytest.raises(UsageError, match=r"gpu: the 103 training images.*from their"):
        on_device.check("gpu", OnDisk(IMAGES))


# ---- flip_translate, and batches made on the devices


def test_every_image_is_mirrored_in_every_other_epoch(monkeypatch):
    """The images are replaced by whether they are mirrored."""
    monkeypatch.setattr(
        pipeline,
        "distort",
        lambda images, distortion, seed, *, flip, **_: flip,
    )
    batches = training_batches(batch_size=10, distortion="flip_translate")
    parts = [part for (part,) in batches.take(42)]
    mirrored, numbers = (np.concatenate(of_all) for of_all in zip(*parts, strict=True))
    epochs = []
    for first in range(0, 4 * COUNT, COUNT):
        order = np.argsort(numbers[first : first + COUNT])
        epochs.append(mirrored[first : first + COUNT][order])
    np.testing.assert_array_equal(epochs[0], ~epochs[1])
    np.testing.assert_array_equal(epochs[0], epochs[2])
    np.testing.assert_array_equal(epochs[1], epochs[3])
    assert 0.3 < epochs[0].mean() < 0.7


@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.parametrize("towers", [1, 3])
def test_batches_made_on_devices_are_those_of_the_queues(four_cpus, distortion, towers):
    expected = training_batches(
        batch_size=8, towers=towers, start_step=11, distortion=distortion
    )
    made = on_device.device_batches(
        IMAGES,
        NUMBERS,
        four_cpus[:towers],
        batch_size=8,
        distortion=distortion,
        seed=5,
        start_step=11,
    )
    with pipeline.PrefetchQueues(made, four_cpus[:towers]) as queues:
        for tower_batches in expected.take(3):
            actual = queues.get()
            for number, (own, other) in enumerate(
                zip(actual, tower_batches, strict=True)
            ):
                assert own[0].device.endswith(f"CPU:{number}")
                np.testing.assert_array_equal(own[0], other[0])
                np.testing.assert_array_equal(own[1], other[1])


def test_what_a_stored_data_set_takes_is_known_before(four_cpus):
    stored = on_device.store(IMAGES, NUMBERS, [*four_cpus[:2], four_cpus[0]])
    assert len(stored) == 2
    for device, tensors in stored.items():
        assert tensors.images.device.lower().endswith(device.removeprefix("/"))
        held = sum(tensor.numpy().nbytes for tensor in tensors)
        assert held == on_device.stored_bytes(IMAGES, NUMBERS)
