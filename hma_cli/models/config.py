"""A model's config.json, read with the origin of every value that was used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from connector.errors import ModelError
from hma_cli.models.classes import CLASSES
from hma_cli.models.fields import Fields, Used

_MAX_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoded config.json. Make it with `parse`.

    name: what the model is called in messages. architecture: the first entry of `architectures`. source: where the file
    came from. notes: what a reader of the figures should know about the file (catalog entries have some).

    Multimodal files nest the language model in `text_config`: only that part holds a KV cache, so it is what counts.
    """

    name: str
    architecture: str
    values: Mapping[str, object]
    source: str
    notes: tuple[str, ...] = ()
    _used: dict[str, Used] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nested(self) -> bool:
        """Whether the language model's fields are in `text_config`."""
        return isinstance(self.values.get("text_config"), Mapping)

    @property
    def used(self) -> Mapping[str, Used]:
        """Values read so far with their origins, by dotted path, in order of first use."""
        return MappingProxyType(self._used)

    @property
    def origins(self) -> Mapping[str, str]:
        """Where each value read so far came from."""
        return MappingProxyType({path: used.origin for path, used in self._used.items()})

    @property
    def root(self) -> Fields:
        """The top of the file."""
        return Fields(model=self.name, values=self.values, used=self._used)

    def language_model(self, model_types: tuple[str, ...]) -> Fields:
        """The language model's fields, with the class defaults of its `model_type`.

        model_types: those that the architecture's rule has been checked with; the first is meant where the file names
        none. ModelError for another one, since its class may fill in other values.
        """
        values = self.values
        text = values.get("text_config")
        if text is None and self.architecture.endswith("ForConditionalGeneration"):
            raise self.root.error(
                "text_config",
                "is missing",
                f"the language model of {self.architecture}",
                "Give the whole config.json of the checkpoint.",
            )
        if text is not None:
            if not isinstance(text, Mapping) or not text:
                raise self.root.error("text_config", "is not an object with fields", "the language model", "Fill it.")
            values = text
        path = "" if text is None else "text_config"
        unclassed = Fields(model=self.name, values=values, path=path, used=self._used)
        found = unclassed.word("model_type", "the class that fills in what the file leaves out", sorted(model_types))
        return Fields(
            model=self.name,
            values=values,
            path=path,
            config_class=CLASSES[found or model_types[0]],
            used=self._used,
        )


def parse(values: object, *, name: str, source: str, notes: tuple[str, ...] = ()) -> ModelConfig:
    """A config from decoded JSON. ModelError where it is no object or names no architecture."""
    label = name if 0 < len(name) <= _MAX_NAME else "The model"
    if not isinstance(values, Mapping):
        raise ModelError(
            f"{label}: its config.json ({source}) holds no JSON object.",
            remedy="Give the config.json of a Hugging Face checkpoint.",
        )
    architectures = values.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(first, str) or not 0 < len(first) <= _MAX_NAME:
        raise ModelError(
            f"{label}: its config.json ({source}) names no architecture, so vLLM would not know which model to build.",
            remedy='Add the field, for example "architectures": ["LlamaForCausalLM"].',
        )
    config = ModelConfig(name=label, architecture=first, values=values, source=source, notes=notes)
    config.root.record("architectures", first, "config.json")
    return config
