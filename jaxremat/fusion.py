"""What compilers compute without writing it to memory, by the names of JAX's primitives."""

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
