"""What compilers compute without writing it to memory, by the names of JAX's primitives, and how each differs."""

from dataclasses import dataclass

# Equations that compilers compute element by element inside of their readers.
FUSED = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim cbrt ceil clamp
    convert_element_type copy copy_p cos cosh custom_jvp_call div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt
    integer_pow imag iota is_finite le log log1p logistic lt max min mul name ne neg nextafter not one_minus_square or pad
    pow random_bits random_unwrap random_wrap real rem reduce_precision reshape rev round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh
    threefry2x32 transpose xor""".split()  # noqa: SIM905
)
# They read element by element what they fold, and write their result.
REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"))

# They read whole arrays, and compilers leave them alone.
CONTRACTIONS = frozenset(("conv_general_dilated", "dot_general"))


@dataclass(frozen=True)
class Compiler:
    """How one of XLA's compilers treats what it could compute inside of a reader, measured by what it allots.

    Attributes:
        fuses_reductions: it computes inside of a reduction what that folds. XLA:CPU does so only where the innermost axes
            alone are folded.
        fuses_operands: it computes inside of a convolution or matrix product what that reads, element by element.
        narrows: what convolutions and matrix products of default precision alone read is written in half as many bytes, as
            bfloat16, which is what they compute with.
        lanes, sublanes: arrays are laid out in tiles of so many 4-byte words in two of their dimensions, which are padded to that;
            1 where they are not.
        near_bytes: of memory beside the main one, where it puts what it can, and which no peak counts.
        near_bytes_at_peak: so much of it is in use when most is.
    """

    fuses_reductions: bool = True
    fuses_operands: bool = False
    narrows: bool = False
    lanes: int = 1
    sublanes: int = 1
    near_bytes: int = 0
    near_bytes_at_peak: int = 0


# The vector memory of TPUs v5e and v6e; measured with a chain of 16 convolutions on v5e.
COMPILERS = {
    "cpu": Compiler(fuses_reductions=False),
    "gpu": Compiler(),
    "tpu": Compiler(
        fuses_operands=True, narrows=True, lanes=128, sublanes=8, near_bytes=128 << 20, near_bytes_at_peak=96 << 20
    ),
}
