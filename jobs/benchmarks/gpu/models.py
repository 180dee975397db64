"""The models of `suite=gpu`: outlines on disk whose weights are drawn into memory, whole and cut to few layers."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.api import Runtime
from runtime.config import RuntimeConfig
from runtime.plan.shape.shapes import Parameter
from runtime.store.checkpoint import open_checkpoint
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from runtime.synthesize.checkpoints import outline_checkpoint

from .config import MODEL_TYPE, GpuConfig
from .drawn import DrawnReader, DrawnWeights


@dataclass(frozen=True, kw_only=True)
class DrawnModel:
    path: Path
    num_layers: int
    weights: DrawnWeights


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    layer_bytes: int
    outer_bytes: int

    def of_layers(self, num_layers: int) -> int:
        return self.outer_bytes + num_layers * self.layer_bytes

    def layers_within(self, num_bytes: float, most: int) -> int:
        return max(1, min(most, int((num_bytes - self.outer_bytes) // self.layer_bytes)))


def draw_model(gpu: GpuConfig, folder: Path, num_layers: int) -> DrawnModel:
    """Writes its outline into `folder`."""
    path = Path(tempfile.mkdtemp(dir=folder))
    keys = {**gpu.shape, "num_hidden_layers": num_layers, "tie_word_embeddings": False}
    weights = outline_checkpoint(model_type=MODEL_TYPE, directory=path, overrides=keys, dtype=torch.bfloat16)
    drawn = DrawnWeights(weights, open_checkpoint(path).tensors)
    return DrawnModel(path=path, num_layers=num_layers, weights=drawn)


def size_of(gpu: GpuConfig, folder: Path) -> ModelSize:
    """Of the model's one layer, and of what is around all of them. Writes the outline of a model of one."""
    keys = {**gpu.shape, "num_hidden_layers": 1, "tie_word_embeddings": False}
    weights = outline_checkpoint(model_type=MODEL_TYPE, directory=folder / "one", overrides=keys, dtype=torch.bfloat16)
    layer = sum(spec.num_bytes for spec in weights.specs if ".layers." in spec.name)
    return ModelSize(layer_bytes=layer, outer_bytes=sum(spec.num_bytes for spec in weights.specs) - layer)


class DrawnRuntime(Runtime):
    """Reads no disk: its weights are drawn."""

    def __init__(self, config: RuntimeConfig, device: ComputeDevice, weights: DrawnWeights):
        self._weights = weights
        super().__init__(config, device=device)

    def reader(self) -> Reader:
        return DrawnReader(self._weights, self.config.offload.reader_threads)


def parameters_of(runtime: Runtime) -> list[Parameter]:
    """Of its model; tied ones once."""
    return list({p.name: p for stage in runtime.model.shape.stages for p in stage.parameters}.values())
