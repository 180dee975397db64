"""What a composite model has beside its text decoder: towers that see or hear, and what fits their output to it. When
text alone is asked, nothing of it is read."""

from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..probing.decoder_config import decoder_config


class UnreadModule(nn.Module):
    """Stands in a module's place, without its weights. Whoever wants to run it must do without."""

    def __init__(self, inner: nn.Module, name: str):
        super().__init__()
        self._inner = (inner,)  # no child: its parameters are none of the model's any more
        self._name = name

    def __getattr__(self, name: str):  # model code reads attributes of its modules
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_inner"][0], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        raise ConfigError(
            f"model.path: {self._name} ({type(self._inner[0]).__name__}) is asked although all prompts are text, and "
            "of a model that also sees or hears the text decoder alone is run"
        )


def leave_unread(model: PreTrainedModel) -> None:
    """Mutates `model`: of a composite one, whatever lies beside the decoder and the head has no weights any more."""
    decoder = model.get_decoder()
    if model.config.is_encoder_decoder or decoder_config(model.config) is model.config or decoder is model:
        return
    kept = set(decoder.modules())
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        kept |= set(module.modules()) if module is not None else set()
    _leave(model, "", kept)


def _leave(module: nn.Module, path: str, kept: set[nn.Module]) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, None)
    for name, child in list(module.named_children()):
        child_path = f"{path}.{name}" if path else name
        if child not in kept and not kept.isdisjoint(child.modules()):
            _leave(child, child_path, kept)
        elif child not in kept and any(True for _ in child.parameters()):
            setattr(module, name, UnreadModule(child, child_path))
