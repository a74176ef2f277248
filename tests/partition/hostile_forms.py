"""One valid call of each operator whose arguments must fit each other. `tests.partition.hostile` spoils the
calls.

A word is a tensor or an argument. `f2.3.4` is a floating-point tensor of that shape, `i2.3` one of indices,
`b2` one of bool, and `f.` one without dimensions. `[1,2]` is a list of integers, `{...}` a list of tensors,
`-` is None, and anything else is a number, a bool or a text.
"""

from partition.model.graph import Argument, DataType, Items, TensorType

FORMS = """
    view f2.3 [3,2]
    reshape f2.3 [-1]
    reshape_as f2.3 f6
    flatten.using_ints f2.3.4 1 2
    unflatten.int f2.6 1 [2,3]
    permute f2.3.4 [2,0,1]
    transpose.int f2.3 0 1
    movedim.int f2.3.4 0 2
    movedim.intlist f2.3.4 [0,1] [1,2]
    expand f2.1.3 [2,5,3]
    broadcast_to f1.3 [2,3]
    unfold f2.8 1 3 2
    diagonal f3.3 0 0 1
    select.int f3.4 1 2
    narrow f3.4 1 1 2
    slice.Tensor f3.8 1 1 7 2
    slice_scatter f3.4 f3.2 1 1 3 1
    select_scatter f3.4 f3 1 2
    split.Tensor f4.3 2 0
    split_with_sizes f4.3 [1,3] 0
    split.sizes f4.3 [2,2] 0
    chunk f4.3 2 0
    unbind.int f2.3 0
    meshgrid {f3,f4}
    meshgrid.indexing {f3,f4} indexing=ij
    bitwise_and.Tensor i3 i3
    __and__.Tensor i3 b3
    where.self b2.3 f2.3 f2.3
    where.ScalarOther b2.3 f2.3 0.5
    where.ScalarSelf b2.3 0.5 f2.3
    where.Scalar b2.3 0.5 1.5
    masked_fill.Scalar f2.3 b2.3 -1.5
    masked_fill.Tensor f2.3 b2.3 f.
    clip.Tensor f2.3 f2.3 f2.3
    pad f2.3.6 [1,2] constant 0.5
    pad f2.3.6.6 [1,2,1,2] reflect
    pad f2.3.6.6 [1,2,1,2] circular
    pad f2.3.6.6 [1,2,-1,2] replicate
    constant_pad_nd f2.3.6 [1,-2,0,1] 0.5
    reflection_pad1d f2.3.6 [1,2]
    reflection_pad2d f2.3.6.6 [1,2,1,2]
    reflection_pad3d f2.3.6.6.6 [1,2,1,2,1,2]
    replication_pad1d f2.3.6 [1,2]
    replication_pad2d f2.3.6.6 [1,2,1,2]
    replication_pad3d f2.3.6.6.6 [1,2,1,2,1,2]
    upsample_nearest1d f2.3.6 [12] 2.0
    upsample_nearest1d.vec f2.3.6 [12] -
    upsample_nearest2d f2.3.6.6 [12,9] 2.0 1.5
    upsample_nearest2d.vec f2.3.6.6 [12,9] -
    upsample_nearest3d f2.3.4.4.4 [8,8,8] 2.0 2.0 2.0
    upsample_nearest3d.vec f2.3.4.4.4 [8,8,8] -
    _upsample_nearest_exact1d.vec f2.3.6 [12] -
    _upsample_nearest_exact2d.vec f2.3.6.6 [12,12] -
    upsample_linear1d f2.3.6 [12] False 2.0
    upsample_linear1d.vec f2.3.6 [12] True -
    upsample_bilinear2d f2.3.6.6 [12,9] False 2.0 1.5
    upsample_bilinear2d.vec f2.3.6.6 [12,9] True -
    upsample_trilinear3d.vec f2.3.4.4.4 [8,8,8] False -
    upsample_bicubic2d f2.3.6.6 [12,9] False 2.0 1.5
    upsample_bicubic2d.vec f2.3.6.6 [12,9] True -
    pixel_shuffle f2.8.3.3 2
    pixel_unshuffle f2.2.6.6 2
    channel_shuffle f2.6.3.3 2
    ger f3 f4
    one_hot i5 8
    diag_embed f2.3 0 0 1
    diag f3.3 1
    tril f3.3 1
    triu f2.3.3 -1
    roll f3.4 [1,2] [0,1]
    flip f3.4 [0,1]
    repeat f2.3 [2,1,3]
    tile f2.3 [2,2]
    repeat_interleave.self_int f2.3 3 1
    count_nonzero.dim_IntList i2.3 [1]
    prod.dim_int f2.3 1
    cumsum f2.3 1
    cumprod f2.3 1
    sort f2.5 1 True
    sort.stable f2.5 stable=True
    argsort f2.5 1 False
    topk f2.5 3 1 True True
    diff f2.6 2 1
    trace f3.3
    logsumexp f2.3 [1]
    norm.ScalarOpt_dim f2.3 2 [1]
    linalg_vector_norm f2.3 2 [1]
    var.correction f2.3 [1] correction=1
    softmax.int f2.3 1
    log_softmax.int f2.3 1
    _softmax f2.3 1 False
    _log_softmax f2.3 1 False
    cross_entropy_loss f4.3 i4 f3 1 -100 0.1
    cross_entropy_loss f4.3.5 i4.5 - 2
    cross_entropy_loss f4.3 f4.3
    nll_loss f4.3 i4 f3 2 0
    nll_loss_nd f4.3.2 i4.2 f3 2 0
    nll_loss2d f2.3.4.4 i2.4.4 f3 2 0
    kl_div f2.3 f2.3 2
    huber_loss f2.3 f2.3 1 0.5
    binary_cross_entropy_with_logits f2.3 f2.3 f2.3 f3 2
    cosine_embedding_loss f2.3 f2.3 f2 0.5 2
    cosine_similarity f2.3 f2.3 1
    pairwise_distance f2.3 f2.3 2.0
    cdist f2.3.4 f2.5.4 2.0 1
    avg_pool1d f2.3.8 [2] [2] [1]
    avg_pool2d f2.3.8.8 [2,3] [2,1] [1,1] True False 3
    avg_pool3d f1.3.6.6.6 [2,2,2] [2,2,2] [1,1,1] False True
    max_pool1d f2.3.8 [3] [2] [1] [2]
    max_pool2d f2.3.8.8 [3,3] [2,2] [1,1] [1,2] True
    max_pool3d f1.3.6.6.6 [2,2,2] [2,2,2] [1,1,1] [1,1,1]
    max_pool2d_with_indices f2.3.8.8 [3,3] [2,2] [1,1] [1,1] False
    adaptive_avg_pool1d f2.3.8 [3]
    adaptive_avg_pool2d f2.3.8.8 [3,5]
    adaptive_avg_pool3d f1.3.6.6.6 [3,2,1]
    adaptive_max_pool1d f2.3.8 [3]
    adaptive_max_pool2d f2.3.8.8 [3,5]
    linear f2.3 f4.3 f4
    addmm f2.4 f2.3 f3.4
    mm f2.3 f3.4
    bmm f2.3.4 f2.4.5
    baddbmm f2.3.5 f2.3.4 f2.4.5
    addbmm f3.5 f2.3.4 f2.4.5
    matmul f2.3.4 f4.5
    mv f2.3 f3
    addmv f2 f2.3 f3
    dot f3 f3
    vdot f3 f3
    inner f2.3 f4.3
    bilinear f2.3 f2.4 f5.3.4 f5
    einsum bij,bjk->bik {f2.3.4,f2.4.5}
    einsum ...ii->...i {f2.3.3}
    conv1d f2.4.8 f6.2.3 f6 [1] [1] [1] 2
    conv1d.padding f2.4.8 f6.2.3 f6 [1] same [2] 2
    conv2d f2.4.8.8 f6.2.3.3 f6 [2,1] [1,1] [1,2] 2
    conv2d.padding f2.4.8.8 f6.4.3.3 f6 [1,1] valid [1,1] 1
    conv3d f1.2.6.6.6 f4.2.3.3.3 f4 [1,1,1] [1,1,1] [1,1,1] 1
    conv3d.padding f1.2.6.6.6 f4.2.3.3.3 f4 [1,1,1] same [1,1,1] 1
    convolution f2.4.8.8 f6.2.3.3 f6 [1,1] [1,1] [1,1] False [0,0] 2
    convolution f2.4.8.8 f4.3.3.3 f6 [2,2] [1,1] [1,1] True [1,1] 2
    conv_transpose1d f2.4.8 f4.3.3 f6 [2] [1] [1] 2 [1]
    conv_transpose2d.input f2.4.8.8 f4.3.3.3 f6 [2,2] [1,1] [1,1] 2 [1,1]
    conv_transpose3d.input f1.2.4.4.4 f2.3.3.3.3 f3 [2,1,1] [1,0,0] [0,0,0] 1 [1,1,1]
    scaled_dot_product_attention f2.2.4.3 f2.2.4.3 f2.2.4.3 - 0.1 True
    scaled_dot_product_attention f2.2.4.3 f2.2.5.3 f2.2.5.3 f4.5 0.0 False scale=0.5
    scaled_dot_product_attention f2.2.4.3 f2.1.5.3 f2.1.5.3 b4.5 0.0 False enable_gqa=True
    layer_norm f2.3.4 [3,4] f3.4 f3.4 1e-5
    native_layer_norm f2.3.4 [4] f4 f4 1e-5
    group_norm f2.6.3 2 f6 f6 1e-5
    instance_norm f2.3.8 f3 f3 - - True 0.1 1e-5 False
    rms_norm f2.3.4 [4] f4 1e-5
    batch_norm f4.3.2 f3 f3 - - True 0.1 1e-5 False
    embedding f5.3 i2.4 -1 False False
    gather f3.4 1 i3.2
    scatter.src f3.4 1 i3.2 f3.2
    scatter.value f3.4 1 i3.2 0.5
    scatter_add f3.4 1 i3.2 f3.2
    index.Tensor f3.4.5 {i2,-,i2}
    index.Tensor f3.4 {b3}
    index_select f3.4 1 i2
    index_put f3.4 {i2} f2.4 True
    index_put f3.4 {i2,i2} f2 False
    index_copy f3.4 0 i2 f2.4
    index_add f3.4 0 i2 f2.4 alpha=2
    index_fill.int_Scalar f3.4 1 i2 0.5
    index_fill.int_Tensor f3.4 1 i2 f.
    take f3.4 i5
    take_along_dim f3.4 i3.4 1
    grid_sampler f2.3.6.6 f2.4.4.2 0 0 False
    grid_sampler f2.3.4.4.4 f2.2.2.2.3 0 1 True
    bucketize.Tensor f2.3 f4
    searchsorted.Tensor f4 f2.3 right=True
    prelu f2.3.4 f3
    glu f2.6 1
    rrelu f2.3 0.1 0.3 True
    lerp.Tensor f2.3 f2.3 f2.3
    addcmul f2.3 f2.3 f2.3 value=0.5
    cat {f2.3,f4.3} 0
    stack {f2.3,f2.3} 1
    linspace 0.0 1.0 7
    arange.start_step 0 10 3
    eye.m 3 4
    full [2,3] 0.5
    tril_indices 3 4 1
    randint.low 2 9 [2,3]
    new_full f2.3 [4] 1.5
    isclose f2.3 f2.3 1e-5 1e-8 True
    nan_to_num f2.3 0.0 1.0 -1.0
"""

_DTYPES: dict[str, DataType] = {"f": "float32", "i": "int64", "b": "bool"}
Form = tuple[str, tuple[object, ...], tuple[tuple[str, Argument], ...]]
"""Operator, arguments (tensors as a TensorType or a list of them), keywords."""


def forms() -> list[Form]:
    """All calls, with the operators' full names."""
    return [_form(line.split()) for line in FORMS.strip().splitlines()]


def _form(words: list[str]) -> Form:
    name = f"aten.{words[0]}" if "." in words[0] else f"aten.{words[0]}.default"
    plain = [word for word in words[1:] if "=" not in word]
    keywords = [word.split("=") for word in words[1:] if "=" in word]
    return name, tuple(_word(word) for word in plain), tuple((key, _scalar(text)) for key, text in keywords)


def _word(word: str) -> object:
    if word.startswith("{"):
        return [_word(part) for part in word[1:-1].split(",")]
    if word.startswith("["):
        return Items(tuple(int(part) for part in word[1:-1].split(",")))
    if word[0] in "fib" and word[1:].replace(".", "").isdigit() | (word[1:] == "."):
        shape = tuple(int(part) for part in word[1:].split(".") if part)
        return TensorType(_DTYPES[word[0]], shape)
    return _scalar(word)


def _scalar(word: str) -> Argument:
    if word in ("-", "True", "False"):
        return {"-": None, "True": True, "False": False}[word]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
