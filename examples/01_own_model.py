"""Trains your own network on CIFAR-10, on all GPUs, and scores it.

    python examples/01_own_model.py [STEPS]

Run again with more steps, it continues from its last checkpoint. After 2,000 steps it
classifies 66 % of the test images correctly.
"""

import sys

from cifar10 import Config, evaluate, train


def small(image_shape, classes):
    """Returns a model from images to logits; the softmax is part of the loss."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(classes),
        ]
    )


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 2_000
    record = train(
        Config(
            model=small,
            optimizer="adam",
            learning_rate=1e-3,
            moving_average_decay=0.99,
            max_steps=steps,
            train_dir="runs/own_model",
        )
    )
    scores = evaluate(record)
    print(f"step {record.step}: {scores['precision @ 1']:.1%} of the test images")


if __name__ == "__main__":
    main()
