"""The allow-list: every operator that a graph may use, with its properties. Data only, no torch.

Names are those of ATen in torch 2.13, by exact overload (`aten.addmm.default`), at the level of
`torch.export`'s training IR, where composite operators such as `linear` or `layer_norm` are kept whole. Only
these operators can be looked up by name at run time, and none of them

- changes its input (`copy_`), except as the in-place twin of a functional one, on a state
  (`Operator.state_twin`);
- exposes memory it did not write (`empty`), or memory by address and stride (`as_strided`, `set_`);
- has results whose shape depends on data (`nonzero`, `masked_select`, `unique`), or reads data into Python
  (`item`);
- accesses anything outside the process (`from_file`), or belongs to a namespace other than `aten`, except
  ATTEND.

A graph cannot pass generators, devices or layouts as arguments: the stage chooses those.
`partition.execute.schema` has the arguments of each operator, and `tests/partition/test_operators.py`
compares this table with torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

BATCH_NORM = "aten.batch_norm.default"
"""The one operator whose running statistics a step updates; several modules treat it by name."""

ATTEND = "peerloom.attend.default"
"""The one operator of our own: attention over pages of keys and values (`partition.execute.attention`)."""
WHOLE_WINDOW = -1
"""The value of `attend`'s window for which a token sees all of its session, including later tokens."""

Cost = Literal[
    "free",
    "elementwise",
    "reduction",
    "matmul",
    "convolution",
    "attention",
    "normalization",
    "gather",
]


@dataclass(frozen=True)
class Operator:
    """One overload.

    `cost` is the class by which its time is estimated. `view`: a result may share memory with an argument.
    `random`: it draws while training, so the generator is seeded before each call. `evaluate` has the
    arguments, by index, that take a different value when the model is evaluated. `state_twin` is the in-place
    form that may replace it if it makes a state's next value and nothing reads the old value later.
    `factory`: it takes no tensor, so it must be told the device.
    """

    name: str
    cost: Cost
    view: bool = False
    random: bool = False
    evaluate: tuple[tuple[int, bool | int | float | None], ...] = ()
    state_twin: str | None = None
    factory: bool = False


# By cost class; without `aten.`, and without `.default` if that is the overload.
_BY_COST: dict[Cost, str] = {
    "free": """
        view reshape view_as reshape_as flatten.using_ints unflatten.int permute transpose.int t
        mT swapaxes swapdims movedim.int movedim.intlist expand expand_as
        broadcast_to broadcast_tensors squeeze squeeze.dim squeeze.dims unsqueeze slice.Tensor select.int
        split.Tensor split.sizes split_with_sizes chunk unbind.int narrow diagonal unfold detach alias
        contiguous meshgrid meshgrid.indexing
        atleast_1d atleast_2d atleast_3d ravel
    """,
    "elementwise": """
        add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar
        div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor
        floor_divide floor_divide.Scalar remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar
        pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar float_power.Tensor_Scalar square sqrt rsqrt
        reciprocal neg negative positive abs absolute sign sgn floor ceil round round.decimals trunc frac
        exp exp2 expm1 log log2 log10 log1p xlogy.Tensor
        erf erfc erfinv special_erf special_erfinv special_expit special_log1p special_expm1
        sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh sinc
        sigmoid tanh logit relu relu6 leaky_relu elu celu selu gelu silu mish softplus softshrink hardshrink
        hardtanh hardswish hardsigmoid threshold prelu rrelu glu log_sigmoid
        eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar
        ge.Tensor ge.Scalar greater.Tensor greater.Scalar less.Tensor less.Scalar
        greater_equal.Tensor greater_equal.Scalar less_equal.Tensor less_equal.Scalar
        not_equal.Tensor not_equal.Scalar isnan isinf isfinite isclose
        logical_and logical_or logical_not logical_xor bitwise_and.Tensor bitwise_and.Scalar
        bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_not
        bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar
        __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar
        where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor
        clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor clip clip.Tensor
        maximum minimum max.other min.other fmax fmin addcmul addcdiv lerp.Scalar lerp.Tensor
        nan_to_num heaviside deg2rad rad2deg copysign.Tensor
        clone copy to.dtype to.other _to_copy type_as
        arange arange.start arange.start_step linspace zeros ones full eye eye.m scalar_tensor
        zeros_like ones_like full_like new_zeros new_ones new_full
        rand randn rand_like randn_like randint randint.low randint_like randint_like.low_dtype
        bernoulli bernoulli.p dropout feature_dropout alpha_dropout feature_alpha_dropout
        cat concat concatenate stack hstack vstack dstack column_stack repeat tile
        repeat_interleave.self_int roll flip fliplr flipud tril triu diag_embed diag
        pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d
        upsample_nearest1d upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec upsample_nearest3d
        upsample_nearest3d.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec
        upsample_linear1d upsample_linear1d.vec upsample_bilinear2d upsample_bilinear2d.vec
        upsample_trilinear3d.vec upsample_bicubic2d upsample_bicubic2d.vec
        pixel_shuffle pixel_unshuffle channel_shuffle slice_scatter select_scatter
        outer ger one_hot tril_indices triu_indices randperm exponential affine_grid_generator im2col col2im
        real imag view_as_real view_as_complex complex polar angle conj_physical
    """,
    "reduction": """
        sum sum.dim_IntList mean mean.dim prod prod.dim_int nansum nanmean
        var var.dim var.correction std std.dim std.correction var_mean.correction std_mean.correction
        max max.dim min min.dim amax amin aminmax argmax argmin
        all all.dim all.dims any any.dim any.dims count_nonzero.dim_IntList
        logsumexp norm.Scalar norm.ScalarOpt_dim linalg_vector_norm
        cumsum cumprod sort sort.stable argsort argsort.stable topk diff trace
        softmax.int log_softmax.int _softmax _log_softmax
        cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss
        binary_cross_entropy binary_cross_entropy_with_logits kl_div
        cosine_embedding_loss
        cosine_similarity pairwise_distance cdist
        avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
        max_pool2d_with_indices
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d
        fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2
        fft_fftn fft_ifftn fft_rfftn fft_irfftn
    """,
    "matmul": """
        linear addmm mm bmm baddbmm addbmm matmul mv addmv dot vdot inner bilinear einsum linalg_matrix_exp
    """,
    "convolution": """
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding convolution
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    """,
    "attention": "scaled_dot_product_attention",
    "normalization": """
        batch_norm layer_norm native_layer_norm group_norm instance_norm rms_norm
    """,
    "gather": """
        embedding embedding_bag.padding_idx
        gather scatter.src scatter.value scatter_add scatter_reduce.two index.Tensor index_select
        index_put index_copy index_add index_fill.int_Scalar index_fill.int_Tensor take take_along_dim
        grid_sampler bucketize.Tensor searchsorted.Tensor
    """,
}

# A result may be the argument itself: by the schema, or because a composite operator may do nothing.
_VIEWS = """
    view reshape view_as reshape_as flatten.using_ints unflatten.int permute transpose.int t mT swapaxes
    swapdims movedim.int movedim.intlist expand expand_as broadcast_to broadcast_tensors squeeze
    squeeze.dim squeeze.dims unsqueeze slice.Tensor select.int split.Tensor split.sizes split_with_sizes
    chunk unbind.int narrow diagonal unfold detach alias contiguous meshgrid meshgrid.indexing atleast_1d
    atleast_2d atleast_3d ravel positive to.dtype to.other type_as einsum dropout feature_dropout
    alpha_dropout feature_alpha_dropout real imag view_as_real view_as_complex conj_physical
"""

_RANDOM = """
    rand randn rand_like randn_like randint randint.low randint_like randint_like.low_dtype bernoulli
    bernoulli.p randperm exponential dropout feature_dropout alpha_dropout feature_alpha_dropout rrelu
    scaled_dot_product_attention
"""

_EVALUATE: dict[str, tuple[tuple[int, bool | int | float | None], ...]] = {
    "dropout": ((2, False),),
    "feature_dropout": ((2, False),),
    "alpha_dropout": ((2, False),),
    "feature_alpha_dropout": ((2, False),),
    "rrelu": ((3, False),),
    "batch_norm": ((5, False),),
    "scaled_dot_product_attention": ((4, 0.0),),
}

_STATE_TWINS = {
    "copy": "copy_",
    "index_copy": "index_copy_",
    "index_put": "index_put_",
    "index_add": "index_add_",
    "scatter.src": "scatter_.src",
    "scatter.value": "scatter_.value",
    "scatter_add": "scatter_add_",
    "masked_fill.Scalar": "masked_fill_.Scalar",
}

_FACTORIES = """
    arange arange.start arange.start_step linspace zeros ones full eye eye.m scalar_tensor rand randn randint
    randint.low randperm tril_indices triu_indices
"""


def _full(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def _table() -> dict[str, Operator]:
    views, random, factories = _VIEWS.split(), _RANDOM.split(), _FACTORIES.split()
    table = {}
    for cost, names in _BY_COST.items():
        for name in names.split():
            twin = _STATE_TWINS.get(name)
            table[_full(name)] = Operator(
                _full(name),
                cost,
                view=name in views,
                random=name in random,
                evaluate=_EVALUATE.get(name, ()),
                state_twin=_full(twin) if twin else None,
                factory=name in factories,
            )
    table[ATTEND] = Operator(ATTEND, "attention")
    return table


OPERATORS: Mapping[str, Operator] = MappingProxyType(_table())
"""Operators by full name, in a fixed but arbitrary order."""
