"""Tracking: metrics sent to TensorBoard, MLflow, or Weights & Biases."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="metrics sent to TensorBoard, MLflow, or Weights & Biases",
    modules=(
        "simulations.callbacks.mlflow",
        "simulations.callbacks.tensorboard",
        "simulations.callbacks.tracking",
        "simulations.callbacks.wandb",
    ),
    rows={
        "callback": {
            "tensorboard": (
                "simulations.callbacks.tensorboard:TensorBoard",
                "event files for TensorBoard in the run's folder",
            ),
            "mlflow": ("simulations.callbacks.mlflow:MLflow", "a run on an MLflow server or in its local store"),
            "wandb": ("simulations.callbacks.wandb:WandB", "a run in Weights & Biases, online or offline"),
        }
    },
    extras=("tensorboard", "mlflow", "wandb"),
    files=("docs/how-to/track-experiments.md",),
)
