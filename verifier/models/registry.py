"""Which class implements an architecture."""

from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.families import FAMILIES
from specdec.verifier.models.llama import CausalLM

MODEL_CLASSES: dict[str, type[CausalLM]] = dict.fromkeys(FAMILIES, CausalLM)


def model_class(config: ModelConfig) -> type[CausalLM]:
    return MODEL_CLASSES[config.architecture]
