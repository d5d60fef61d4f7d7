"""TensorFlow's CIFAR-10 tutorial for several GPUs on one page, in TensorFlow 2.

    python examples/one_page.py --num_gpus 4 --max_steps 1000
    python examples/one_page.py --eval

A tower is a copy of the model; --num_gpus counts towers, which share all GPUs,
or the CPU. Each computes the same function of the same variables on its own 128 images.
The CPU holds the variables, averages the towers' gradients, and updates once. The
tutorial reports 86 % after 100,000 steps of 128 images in all.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
TRAIN_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST_FILES = ["test_batch.bin"]

BATCH_SIZE = 128  # Per tower.
CROP = 24  # The model sees 24 x 24 of the 32 x 32 pixels.
EXAMPLES_PER_EPOCH = 50_000
INITIAL_LEARNING_RATE = 0.1
LEARNING_RATE_DECAY_FACTOR = 0.1
EPOCHS_PER_DECAY = 350.0
MOVING_AVERAGE_DECAY = 0.9999
WEIGHT_DECAY = 0.004  # For the weights of local3 and local4.
LAYERS = {  # Shape and standard deviation of the initial weights; initial biases.
    "conv1": ([5, 5, 3, 64], 5e-2, 0.0),
    "conv2": ([5, 5, 64, 64], 5e-2, 0.1),
    "local3": ([6 * 6 * 64, 384], 0.04, 0.1),
    "local4": ([384, 192], 0.04, 0.1),
    "softmax_linear": ([192, 10], 1 / 192, 0.0),
}


def read_records(folder, names):
    """Reads uint8 images [count, 32, 32, 3] and int64 labels [count].

    A record is a byte for the label, then 1,024 each of red, green and blue, by rows.
    """
    records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
    records = records.reshape(-1, 1 + 3 * 32 * 32)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, records[:, 0].astype(np.int64)


def distort(image):
    image = tf.image.random_crop(tf.cast(image, tf.float32), [CROP, CROP, 3])
    image = tf.image.random_flip_left_right(image)
    image = tf.image.random_brightness(image, max_delta=63)
    image = tf.image.random_contrast(image, lower=0.2, upper=1.8)
    return tf.image.per_image_standardization(image)


def distorted_batches(images, labels, num_towers):
    """Returns an endless iterator that keeps two batches per tower prefetched."""
    with tf.device("/cpu:0"):  # Not in the memory of a GPU.
        dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(len(images)).repeat()
    dataset = dataset.map(lambda x, y: (distort(x), y), tf.data.AUTOTUNE)
    return iter(dataset.batch(BATCH_SIZE).prefetch(2 * num_towers))


def inference(parameters, images):
    """Returns logits [batch, 10] of standardized images [batch, 24, 24, 3]."""

    def convolve(inputs, weights, biases):
        return tf.nn.relu(tf.nn.conv2d(inputs, weights, 1, "SAME") + biases)

    def pool(inputs):
        return tf.nn.max_pool2d(inputs, ksize=3, strides=2, padding="SAME")

    def normalize(inputs):
        # As tf.nn.local_response_normalization, which lacks float64: radius 4.
        window = tf.linalg.band_part(tf.ones([64, 64], inputs.dtype), 4, 4)
        return inputs / (1.0 + 0.001 / 9.0 * (inputs**2 @ window)) ** 0.75

    def connect(inputs, weights, biases):
        return inputs @ weights + biases

    net = normalize(pool(convolve(images, *parameters["conv1"])))
    net = pool(normalize(convolve(net, *parameters["conv2"])))
    net = tf.reshape(net, [-1, 6 * 6 * 64])
    net = tf.nn.relu(connect(net, *parameters["local3"]))
    net = tf.nn.relu(connect(net, *parameters["local4"]))
    return connect(net, *parameters["softmax_linear"])


def tower_loss(parameters, images, labels):
    """Returns the mean cross entropy of a tower's batch, plus the weight decay."""
    logits = inference(parameters, images)
    entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    squares = [tf.nn.l2_loss(parameters[name][0]) for name in ("local3", "local4")]
    return tf.reduce_mean(entropies) + WEIGHT_DECAY * tf.add_n(squares)


def average_gradients(tower_gradients):
    """Averages over towers of equal batches: the gradient over the global batch."""
    return tf.nest.map_structure(lambda *g: tf.add_n(g) / len(g), *tower_gradients)


class Training(tf.Module):
    """The state that a checkpoint holds, and the step that updates it."""

    def __init__(self, devices=(), dtype=tf.float32):  # Its test takes float64.
        super().__init__()
        self.devices, self.dtype = devices, dtype  # A device for each tower.
        with tf.device("/cpu:0"):
            self.parameters = {}
            for layer, (shape, stddev, bias) in LAYERS.items():
                weights = tf.random.truncated_normal(shape, stddev=stddev, dtype=dtype)
                biases = tf.fill(shape[-1:], tf.cast(bias, dtype))
                self.parameters[layer] = [tf.Variable(weights), tf.Variable(biases)]
            self.averages = tf.nest.map_structure(tf.Variable, self.parameters)
            self.global_step = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(self, batches):
        """Runs every tower on its batch, updates once, and returns the mean loss."""
        losses, tower_gradients = [], []
        for device, batch in zip(self.devices, batches, strict=True):
            # On the tower's device: forward and backward, through a copy of them.
            with tf.device(device), tf.GradientTape() as tape:
                copy = tf.nest.map_structure(tf.identity, self.parameters)
                losses.append(tower_loss(copy, *batch))
                tower_gradients.append(tape.gradient(losses[-1], self.parameters))
        with tf.device("/cpu:0"):
            # The synchronization point: the mean needs every tower's gradients.
            gradients = average_gradients(tower_gradients)
            self._update(gradients, len(batches) * batches[0][1].shape[0])
            mean_loss = tf.add_n(losses) / len(losses)
            return tf.debugging.check_numerics(mean_loss, "The model diverged.")

    def _update(self, gradients, global_batch_size):
        step = tf.cast(self.global_step, tf.float64)
        decays = step * global_batch_size // (EPOCHS_PER_DECAY * EXAMPLES_PER_EPOCH)
        learning_rate = INITIAL_LEARNING_RATE * LEARNING_RATE_DECAY_FACTOR**decays
        # The decay is smaller at first, so that averages leave the initial values.
        decay = tf.minimum((1 + step) / (10 + step), MOVING_AVERAGE_DECAY)
        rate, rest = tf.cast(learning_rate, self.dtype), tf.cast(1 - decay, self.dtype)
        state = map(tf.nest.flatten, (self.parameters, self.averages, gradients))
        for parameter, average, gradient in zip(*state, strict=True):
            parameter.assign_sub(rate * gradient)
            average.assign_sub(rest * (average - parameter))
        self.global_step.assign_add(1)


def train(folder, train_dir, num_towers, max_steps):
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices()
    devices = [found[tower % len(found)].name for tower in range(num_towers)]
    training = Training(devices)
    checkpoint = tf.train.Checkpoint(training=training)
    manager = tf.train.CheckpointManager(checkpoint, train_dir, max_to_keep=5)
    manager.restore_or_initialize()
    print(f"From step {int(training.global_step)}, towers on {', '.join(devices)}")
    batches = distorted_batches(*read_records(folder, TRAIN_FILES), num_towers)
    for step in range(int(training.global_step) + 1, max_steps + 1):
        began = time.perf_counter()
        loss = float(training.step([next(batches) for _ in devices]))
        if step % 10 == 0:
            rate = num_towers * BATCH_SIZE / (time.perf_counter() - began)
            print(f"step {step}, loss = {loss:.2f} ({rate:,.0f} images/s)", flush=True)
        if step % 1000 == 0 or step == max_steps:
            manager.save(checkpoint_number=step)


def evaluate(folder, train_dir):
    images, labels = read_records(folder, TEST_FILES)
    images = tf.image.resize_with_crop_or_pad(tf.cast(images, tf.float32), CROP, CROP)
    images = tf.image.per_image_standardization(images)
    training, newest = Training(), tf.train.latest_checkpoint(train_dir)
    if newest is None:
        raise SystemExit(f"There is no checkpoint in {train_dir}; train first.")
    tf.train.Checkpoint(training=training).restore(newest).expect_partial()
    logits = [inference(training.averages, part) for part in tf.split(images, 10)]
    precision = np.mean(np.argmax(tf.concat(logits, 0), 1) == labels)
    print(f"step {int(training.global_step)}: precision @ 1 = {precision:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_gpus", type=int, default=1, choices=range(1, 65))
    parser.add_argument("--max_steps", type=int, default=100_000, help="in all")
    parser.add_argument("--train_dir", default="runs/one_page")
    parser.add_argument("--data_dir", default=os.environ.get("CIFAR10_DATA_DIR"))
    parser.add_argument("--eval", action="store_true", help="score, not train")
    flags = parser.parse_args()
    data = flags.data_dir or tf.keras.utils.get_file(origin=URL, extract=True)
    found = [path.parent for path in Path(data).rglob(TEST_FILES[0])]
    if not found:
        parser.error(f"{data} has no {TEST_FILES[0]}; --data_dir names its folder")
    if flags.eval:
        evaluate(found[0], flags.train_dir)
    else:
        train(found[0], flags.train_dir, flags.num_gpus, flags.max_steps)
