"""A plain Keras loop: `GradientTape`, `model(images, training=True)`, an optimizer.

It imports nothing of the package. With one batch a step it is what anybody writes who
trains with Keras. With several it states in fifteen lines what towers mean.
"""

import keras
import numpy as np
import tensorflow as tf

SHAPE, CLASSES = (8, 8, 3), 4
SEED, DECAY = 3, 0.5
# docs/subtleties.md: the seeds of tower n are those of the model plus n times this.
STRIDE = 0x9E3779B1


def cross_entropy(labels, logits):
    entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(entropies)


def built(build, policy="float64"):
    """Returns the model that a function builds under a dtype policy and a seed."""
    earlier = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(SEED)
        model = build(SHAPE, CLASSES)
        if not model.built:
            model(np.zeros((2, *SHAPE), np.float32))
        return model
    finally:
        keras.config.set_dtype_policy(earlier)


def batches(steps=3, images=8):
    """Returns the same batches for everybody."""
    random = np.random.default_rng(0)
    return [
        (random.normal(size=(images, *SHAPE)), random.integers(0, CLASSES, images))
        for _ in range(steps)
    ]


def gradients(model, loss, images, labels):
    """Returns the loss of a batch and its gradients. Layers keep their new state.

    `fit` compiles this, which takes longer than three steps without.
    """
    with tf.GradientTape() as tape:
        logits = tf.cast(model(images, training=True), model.variable_dtype)
        total = loss(labels, logits)
        for penalty in model.losses:
            total += tf.reduce_sum(tf.cast(penalty, total.dtype))
    found = tape.gradient(total, [v.value for v in model.trainable_variables])
    return total, [one if one is None else tf.convert_to_tensor(one) for one in found]


def step(model, optimizer, compute, parts):
    """Trains one step on the parts of a batch, one for each tower; returns the loss.

    Each part meets the same values of all variables. The update takes the mean of the
    gradients. Batch statistics become the mean of what the parts make of them, counters
    and states of random generators what the first part makes of them. `compute` maps
    images and labels to their loss and `gradients`.
    """
    state = model.non_trainable_variables
    before = [variable.numpy() for variable in state]
    losses, found, after = [], [], []
    for number, (images, labels) in enumerate(parts):
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)
            if variable.name == "seed_generator_state":
                seed, counter = value.tolist()
                variable.assign([(seed + number * STRIDE) % 2**32, counter])
        one, of_part = compute(tf.constant(images), tf.constant(labels))
        losses.append(float(one))
        found.append(of_part)
        after.append([variable.numpy() for variable in state])
    for variable, values in zip(state, zip(*after, strict=True), strict=True):
        is_number = "float" in variable.dtype
        variable.assign(np.mean(values, axis=0) if is_number else values[0])
    means = [
        None if any(one is None for one in each) else sum(each) / len(each)
        for each in zip(*found, strict=True)
    ]
    pairs = zip(means, model.trainable_variables, strict=True)
    present, variables = zip(*((g, v) for g, v in pairs if g is not None), strict=True)
    optimizer.apply(present, variables)
    return np.mean(losses)


def averaged(averages, model, decay, step):
    """Returns moving averages after a step, as `tf.train.ExponentialMovingAverage`."""
    decay = min(decay, (1 + step) / (10 + step))
    return [
        (decay * one + (1.0 - decay) * variable.numpy()).astype(one.dtype)
        for one, variable in zip(averages, model.trainable_variables, strict=True)
    ]
