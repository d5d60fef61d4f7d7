"""Records a run in MLflow; a resumed run continues its record.

mlflow server --port 5000
MLFLOW_TRACKING_URI=http://127.0.0.1:5000 python examples/03_mlflow.py [STEPS]
"""

import math
import sys

import mlflow

from cifar10 import Config, train


class MLflow:
    """Sends settings, curves and scores to a tracking server."""

    def on_start(self, run):
        if mlflow.active_run():  # Continues after a rollback.
            return
        noted = run.train_dir / "mlflow_run_id"
        earlier = noted.read_text() if noted.exists() else None
        record = mlflow.start_run(run_id=earlier, run_name=run.train_dir.name)
        noted.write_text(record.info.run_id)
        if earlier is None:
            names = ("model", "data", "optimizer", "learning_rate", "global_batch_size")
            mlflow.log_params({name: run.settings[name] for name in names})

    def on_log(self, step, metrics):
        self._send(step, metrics, "train")

    def on_evaluation(self, step, metrics):
        self._send(step, metrics, "test")

    def _send(self, step, metrics, part):
        # MLflow takes no @ in names; NaN stands for a rate that was not measured.
        named = {f"{part}/{k.replace('@', 'at')}": v for k, v in metrics.items()}
        mlflow.log_metrics({k: v for k, v in named.items() if math.isfinite(v)}, step)

    def on_end(self, step, why):
        ends = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        mlflow.end_run(ends[why])


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 1_000
    train(
        Config(max_steps=steps, eval_steps=min(steps, 250), train_dir="runs/mlflow"),
        hooks=[MLflow()],
    )


if __name__ == "__main__":
    main()
