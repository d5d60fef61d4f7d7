"""Inputs: which image comes when, for every split into towers and from any step."""

import functools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.augmentation import MIXING, PARTS
from cifar10.config.fields import DISTORTIONS
from cifar10.evaluation.scored_set import evaluation_batches
from cifar10.input import calls, on_device, pipeline
from cifar10.input.augmentation import Augmentation
from small_sets import OnDisk, assert_equal, joined

COUNT = 103
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 32, 32, 3), np.uint8)
# Each image's label is its number, so that batches tell which images they hold.
NUMBERS = np.arange(COUNT, dtype=np.int32)


def training_batches(distortion="none", images=IMAGES, labels=NUMBERS, **options):
    options = {"towers": 1, "start_step": 0, **options}
    return pipeline.training_batches(images, labels, maker(distortion), **options)


def maker(distortion, seed=5):
    return pipeline.BatchMaker(distortion, seed)


@functools.cache
def whole():
    """Returns batches of one tower from step 0 on, the fifth of which ends an epoch."""
    batches = training_batches("tutorial", batch_size=24).take(7)
    return [joined(towers) for towers in batches]


# ---- order


@pytest.mark.parametrize(
    ("count", "seed"), [(103, 0), (103, 2**31 - 1), (1000, 1), (50_000, 0)]
)
def test_order_is_random_and_visits_every_image_once_an_epoch(count, seed):
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
        np.testing.assert_array_equal(np.sort(order), np.arange(count))
        assert np.sum(order == np.arange(count)) < 10
        assert np.sum(order == following) < 10
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < bound
        assert abs(np.corrcoef(order, following)[0, 1]) < bound
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < bound


# ---- batches


def test_images_and_labels_belong_together():
    batches = training_batches(batch_size=4, towers=3)
    # An iterator's end would wait for the thread that tunes it, for up to a minute.
    assert batches.options().autotune.enabled is False
    for towers in batches.take(2):
        for images, labels in towers:
            assert (images.shape, images.dtype) == ((4, 32, 32, 3), tf.float32)
            assert (labels.shape, labels.dtype) == ((4,), tf.int64)
            # Mean and deviation of CIFAR-10's channels.
            chosen = IMAGES[labels.numpy()] / 255 - (0.4914, 0.4822, 0.4465)
            expected = chosen / (0.2470, 0.2435, 0.2616)
            np.testing.assert_allclose(images, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("towers", "workers", "on_devices"),
    [(4, 1, False), (2, 3, False), (2, 3, True)],
)
def test_global_batches_do_not_depend_on_towers_and_workers(
    four_cpus, towers, workers, on_devices
):
    options = {"batch_size": 24 // workers // towers, "start_step": 3}
    streams = []
    for worker in range(workers):
        order = {**options, "worker": (worker, workers)}
        if on_devices:
            order["devices"] = four_cpus[:towers]
            source = IMAGES, NUMBERS, maker("tutorial")
            batches = on_device.device_batches(*source, **order)
        else:
            batches = training_batches("tutorial", towers=towers, **order)
        streams.append(iter(batches))
    for expected in whole()[3:6]:
        parts = [tower for stream in streams for tower in next(stream)]
        assert len(parts) == workers * towers
        assert_equal([joined(parts)], [expected])


def test_distortions_differ_between_steps_and_between_seeds():
    """A set of one image tells the distortions from the order."""

    def first_two(seed):
        source = IMAGES[:1], NUMBERS[:1], maker("crop_flip", seed)
        options = {"batch_size": 8, "towers": 1, "start_step": 0}
        batches = pipeline.training_batches(*source, **options)
        return [joined(towers)[0].tobytes() for towers in batches.take(2)]

    assert len({*first_two(5), *first_two(6)}) == 4


def test_every_image_is_mirrored_in_every_other_epoch(monkeypatch):
    """The images are replaced by whether they are mirrored."""
    monkeypatch.setattr(
        pipeline, "distort", lambda images, distortion, seed, batch_slice, flip: flip
    )
    batches = training_batches("flip_translate", batch_size=10).take(42)
    mirrored, numbers = joined([joined(towers) for towers in batches])
    parts = [slice(first, first + COUNT) for first in range(0, 4 * COUNT, COUNT)]
    epochs = [mirrored[part][np.argsort(numbers[part])] for part in parts]
    np.testing.assert_array_equal(epochs[0], ~epochs[1])
    np.testing.assert_array_equal(epochs[0], epochs[2])
    np.testing.assert_array_equal(epochs[1], epochs[3])
    assert 0.3 < epochs[0].mean() < 0.7


def test_mirroring_is_drawn_independently_of_the_step(monkeypatch):
    seeds = []

    def noting(shape, seed):
        seeds.append(tuple(np.asarray(seed)))
        return uniform(shape, seed)

    uniform = pipeline.uniform
    monkeypatch.setattr(pipeline, "uniform", noting)
    of_all = pipeline.BatchSlice(0, 4, 4)
    for step in range(3):
        maker("flip_translate").plan(tf.constant(step, tf.int64), of_all, COUNT)
    ((seed, step),) = {*seeds}
    assert seed == 5
    assert step < 0


# ---- queues


def numbered(towers, made=None, count=2**62):
    """Yields batches: at step s tower t gets 10 s + t. Notes the steps."""
    for step in range(count):
        if made is not None:
            made.append(step)
        yield tuple((tf.constant(10 * step + t), tf.constant(step)) for t in towers)


def test_every_tower_gets_its_own_batches_in_order_on_its_device(four_cpus):
    with pipeline.PrefetchQueues(numbered(range(4)), four_cpus) as queues:
        for step in range(5):
            for tower, tensors in enumerate(queues.get()):
                assert [int(tensor) for tensor in tensors] == [10 * step + tower, step]
                assert all(t.device.endswith(f"CPU:{tower}") for t in tensors)


def test_a_pipeline_error_is_raised_after_the_preceding_batches(four_cpus):
    def batch(step):
        tf.debugging.assert_none_equal(step, np.int64(2), message="step 2 is broken")
        return ((step, step), (step, step))

    batches = tf.data.Dataset.range(10).map(batch)
    with pipeline.PrefetchQueues(batches, four_cpus[:2]) as queues:
        for step in (0, 1):
            assert [int(images) for images, _ in queues.get()] == [step, step]
        with pytest.raises(tf.errors.InvalidArgumentError, match="broken"):
            queues.get()


def test_images_stay_on_the_cpu_despite_a_programs_chosen_device(four_cpus):
    """Another logical one stands for a GPU, whose memory they would fill."""
    with tf.device(four_cpus[1]):
        whole = pipeline.in_graph(IMAGES)
        steps = [[(tf.constant(IMAGES[:2]), tf.constant(NUMBERS[:2]))]] * 2
        ((images, labels),) = next(calls.in_calls(steps, [2], most=3))
    for one in (whole, images, labels):
        assert one.device.endswith("/device:CPU:0")
    assert images.shape == (3, *steps[0][0][0].shape)


def test_labels_stay_on_the_cpu_despite_a_programs_chosen_device(
    four_cpus, monkeypatch
):
    """Each batch takes some there; else all would travel for it."""
    made, constant = [], tf.constant

    def noting(*given, **options):
        made.append(constant(*given, **options))
        return made[-1]

    monkeypatch.setattr(tf, "constant", noting)
    with tf.device(four_cpus[1]):
        training_batches(batch_size=4)
        evaluation_batches(IMAGES, NUMBERS, 4)
    held = [one for one in made if one.shape.rank and one.shape[0] == COUNT]
    assert len(held) == 4
    assert {one.device[-5:] for one in held} == {"CPU:0"}


def test_each_queue_holds_two_batches_and_one_more_waits(four_cpus):
    made = []
    with pipeline.PrefetchQueues(numbered(range(2), made), four_cpus[:2]) as queues:
        for steps in (3, 4):
            while len(made) < steps:
                time.sleep(0.01)
            time.sleep(0.1)
            # Besides those in the queues one waits in the thread for a place.
            assert len(made) == steps
            queues.get()


def test_the_thread_ends_with_the_run(four_cpus):
    made = []
    before = threading.active_count()
    with pipeline.PrefetchQueues(numbered(range(2), made), four_cpus[:2]):
        while len(made) < 3:  # The queues are full.
            time.sleep(0.01)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


# ---- evaluation


@pytest.mark.parametrize("batch_size", [16, 50])
def test_evaluation_shows_every_image_once_and_in_order(batch_size):
    images, numbers = IMAGES[:37], NUMBERS[:37]
    dataset = evaluation_batches(images, numbers, batch_size)
    assert dataset.options().autotune.enabled is False
    batches = list(dataset)
    assert len(batches) == -(-37 // batch_size)
    for crops, labels, mask in batches:
        assert (crops.shape, crops.dtype) == ((batch_size, 24, 24, 3), tf.float32)
        assert (labels.shape, labels.dtype) == ((batch_size,), tf.int32)
        assert np.isfinite(crops).all()
        assert mask.shape == (batch_size,)
    crops, labels, masks = (np.concatenate(part) for part in zip(*batches, strict=True))
    # The last batch is filled up with images that do not count.
    np.testing.assert_array_equal(masks, np.arange(len(masks)) < 37)
    np.testing.assert_array_equal(labels, np.minimum(np.arange(len(masks)), 36))
    expected = [tf.image.per_image_standardization(i[4:28, 4:28]) for i in images]
    np.testing.assert_allclose(crops[:37], expected, rtol=1e-4, atol=1e-5)
    again = [labels.numpy().tolist() for _, labels, _ in dataset]
    assert np.concatenate(again).tolist() == labels.tolist()


def test_an_evaluation_reads_each_image_of_a_disk_once():
    images = OnDisk(IMAGES)
    options = {"batch_size": 16, "distortion": "flip_translate", "count": 30}
    batches = evaluation_batches(images, NUMBERS, **options)
    expected = evaluation_batches(IMAGES[:30], NUMBERS[:30], 16)
    for (_, numbers, mask), others in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(numbers, others[1])
        np.testing.assert_array_equal(mask, others[2])
    # The last batch is filled up with the last image.
    assert images.count().tolist() == [1] * 29 + [3] + [0] * (COUNT - 30)


# ---- images that are not in memory


def test_a_worker_reads_only_its_own_part_of_each_batch_from_a_disk():
    images = OnDisk(IMAGES)
    options = {"batch_size": 6, "towers": 2, "worker": (1, 2), "start_step": 3}
    batches = training_batches("tutorial", images, **options)
    expected = [(images[12:], labels[12:]) for images, labels in whole()[3:]]
    assert_equal(map(joined, batches.take(4)), expected)
    read = [chosen.tolist() for chosen in images.chosen]
    assert all(labels.tolist() in read for _, labels in expected)
    assert {len(part) for part in read} == {12}
    # Some batches are made ahead: two stages make two each, and as many wait.
    assert len(read) <= 4 + 2 * (2 + pipeline.QUEUE_CAPACITY)


def test_a_mapped_array_is_not_taken_for_one_in_memory(tmp_path):
    """It derives from NumPy's array."""
    mapped = np.memmap(tmp_path / "images", np.uint8, "w+", shape=IMAGES.shape)
    assert pipeline.is_in_memory(IMAGES)
    assert not pipeline.is_in_memory(mapped)


def test_batches_of_a_disk_are_made_side_by_side_in_a_deterministic_run():
    """TensorFlow makes one after another of what has a state."""
    function = tf.function(lambda chosen: pipeline.take(OnDisk(IMAGES), chosen))
    traced = function.get_concrete_function(tf.TensorSpec([4], tf.int64))
    assert not any(op.op_def.is_stateful for op in traced.graph.get_operations())
    chosen = [7, 0, 7, 102]
    images = traced(tf.constant(chosen, tf.int64))
    np.testing.assert_array_equal(images, IMAGES[chosen])


# ---- batches made on the devices


def test_batches_made_on_devices_equal_the_batches_of_the_queues(four_cpus):
    options = {"batch_size": 8, "start_step": 11}
    expected = training_batches("flip_translate", towers=3, **options)
    source = IMAGES, NUMBERS, maker("flip_translate")
    made = on_device.device_batches(*source, devices=four_cpus[:3], **options)
    for batches, others in zip(made, expected.take(3), strict=False):
        assert_equal(batches, others)
        devices = [images.device[-5:] for images, _ in batches]
        assert devices == ["CPU:0", "CPU:1", "CPU:2"]


EVERYTHING = {
    **{part: {} for part in PARTS},
    **{part: {"probability": 0.4} for part in MIXING},
}


@pytest.mark.parametrize("augmentation", [None, Augmentation(EVERYTHING, 1000)])
@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_batches_of_a_call_made_at_once_equal_the_batches_of_its_steps(
    four_cpus, distortion, augmentation
):
    """Bit for bit, on two towers of the second of two workers."""
    made_by = pipeline.BatchMaker(distortion, seed=3, augmentation=augmentation)
    order = {"batch_size": 4, "start_step": 11, "worker": (1, 2)}
    source = IMAGES, NUMBERS, made_by
    whole = pipeline.training_batches(*source, towers=2, **order)
    counts, most = [3, 1, 2], 3
    ours = on_device.device_batches(
        *source, devices=four_cpus[:2], counts=counts, most=most, **order
    )
    both = [*ours], [*calls.in_calls(whole, counts, most)]
    singles = iter(whole)
    for count, *made in zip(counts, *both, strict=True):
        for step in range(count):
            single = next(singles)
            for call in made:
                assert_equal([(x[step], y[step]) for x, y in call], single)


def test_only_images_in_memory_are_stored_on_a_gpu():
    assert on_device.fits(IMAGES, NUMBERS)
    shapes = np.broadcast_to(np.uint8(0), (50_000, 32, 32, 3)), np.zeros(50_000)
    assert on_device.fits(*shapes, parts=3)
    assert not on_device.fits(*shapes, parts=4), "four copies on one GPU"
    assert not on_device.fits(OnDisk(IMAGES), NUMBERS)


def test_the_size_of_a_stored_data_set_is_predicted_exactly(four_cpus):
    stored = on_device.store(IMAGES, NUMBERS, [*four_cpus[:2], four_cpus[0]])
    assert len(stored) == 2
    for device, tensors in stored.items():
        assert tensors[0].device.lower().endswith(device.removeprefix("/"))
        held = sum(tensor.numpy().nbytes for tensor in tensors)
        assert held == on_device.stored_bytes(IMAGES, NUMBERS)
