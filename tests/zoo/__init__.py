"""A zoo of models that train: they prove that any module can be cut, and benchmarks run them.

`ZOO` maps a name to a function of a scale. `tests.zoo.equivalence` compares a cut model with the same module
in one process.
"""

from collections.abc import Callable, Mapping

from tests.zoo import hugging_face, sequences, tables, vision
from tests.zoo.case import Case, Scale

ZOO: Mapping[str, Callable[[Scale], Case]] = {
    "mlp": tables.mlp,
    "simple-cnn": vision.simple_cnn,
    "resnet18": vision.resnet18,
    "unet": vision.unet,
    "mobilenet": vision.mobilenet,
    "densenet": vision.densenet,
    "autoencoder": vision.autoencoder,
    "siamese": vision.siamese,
    "mixer": vision.mixer,
    "gpt": sequences.gpt,
    "lstm": sequences.lstm,
    "gru": sequences.gru,
    "experts": sequences.experts,
    "temporal": sequences.temporal,
    "translator": sequences.translator,
    "recommender": tables.recommender,
    "graph-network": tables.graph_network,
    "hf-gpt2": hugging_face.gpt2,
    "hf-llama": hugging_face.llama,
    "hf-bert": hugging_face.bert,
    "hf-vit": hugging_face.vit,
}

__all__ = ["ZOO", "Case", "Scale"]
