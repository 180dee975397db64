"""Kernels compiled at first use, for operations for which torch has no fast operator: linear layers on stored weights,
decode attention, and row-wise steps between products. Numba compiles for a CPU, Triton for an accelerator. Kernels take
arrays and numbers; they know no tensors, models or plans.

Public to `linear`, `attention` and `model`: `linear.lay_out_inputs`, `linear.linear`, `attention.attend`, and
`rowwise.gate_rows`, `norm_rows` and `rotate_rows`; `amx.linear` and `amx.attention` for the CPU's matrix unit;
`device_matrices` in Triton. `compiler` tells which kernels can run here and `arguments` defines their arguments;
importing these two loads no compiler. `compiled.cached_kernels_only` tells which kernels are on disk.
"""
