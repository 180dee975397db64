"""Kernels compiled at first use, where torch has no fast operator: linear layers on weights as stored, decode
attention, and row-wise steps between products. Numba compiles CPU kernels, which take NumPy arrays and numbers; Triton
compiles accelerator kernels. This package knows no models or plans.

| module | what other packages use |
|---|---|
| `linear` | products with vector instructions: `lay_out_inputs`, `linear`, `linear_packed` |
| `attention`, `attention_quantized` | decode attention: `attend` |
| `rowwise` | `gate_rows`, `norm_rows`, `rotate_rows` |
| `amx.linear`, `amx.attention` | products and decode attention on the CPU's matrix unit |
| `device_matrices` | Triton kernels on stored matrices |
| `compiler` | which kernels can run here; loads no compiler |
| `arguments` | argument types of kernels; loads no compiler |
| `compiled` | `cached_kernels_only`: a context in which a kernel that is not cached on disk raises |
"""
