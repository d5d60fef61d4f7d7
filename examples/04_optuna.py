"""Searches for learning rate and weight averaging with Optuna; writes a recipe.

    python examples/04_optuna.py [TRIALS] [STEPS]
    python train.py --recipe runs/search/best.toml

Trials that fall behind are ended early. Run again, it continues the search.
"""

import sys
from pathlib import Path

import optuna

from cifar10 import Config, train

SEARCH = Path("runs/search")


class Pruning:
    """Reports each score to Optuna, and ends a trial that falls behind."""

    def __init__(self, trial):
        self.trial = trial

    def on_evaluation(self, step, metrics):
        self.trial.report(metrics["precision @ 1"], step)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def objective(trial, steps):
    config = Config(
        learning_rate=trial.suggest_float("learning_rate", 0.01, 0.5, log=True),
        moving_average_decay=trial.suggest_float("moving_average_decay", 0.9, 0.999),
        max_steps=steps,
        eval_steps=max(steps // 4, 1),
        train_dir=SEARCH / f"trial_{trial.number}",
    )
    return train(config, hooks=[Pruning(trial)]).best[1]


def main():
    trials = int(sys.argv[1]) if sys.argv[1:] else 20
    steps = int(sys.argv[2]) if sys.argv[2:] else 1_000
    SEARCH.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="search",
        storage=f"sqlite:///{SEARCH}/optuna.db",
        direction="maximize",
        load_if_exists=True,
    )
    study.optimize(lambda trial: objective(trial, steps), n_trials=trials)
    recipe = "".join(f"{name} = {value}\n" for name, value in study.best_params.items())
    (SEARCH / "best.toml").write_text(recipe)
    print(f"{study.best_value:.1%} by {SEARCH}/best.toml:\n{recipe}", end="")


if __name__ == "__main__":
    main()
