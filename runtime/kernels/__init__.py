"""Code that numba compiles for a CPU, or Triton for an accelerator, at its first use, for what torch has no fast
operator for: linear layers on weights as they are stored, decode attention, and the steps between products. Here may
enter what a compiler must see whole to be fast; it takes arrays and numbers, and knows no tensor, no model and no plan.

The seam, which `linear`, `attention` and `model` may import: `linear.lay_out_inputs` and `linear.linear`,
`attention.attend`, and `rowwise.gate_rows`, `norm_rows` and `rotate_rows`; `amx.linear` and `amx.attention` offer the
same in the processor's matrix unit; `device_matrices` are in Triton, for weights as they are stored, on an accelerator.
`compiler` says which of them can run here, and `arguments` holds what they are given; these two load no compiler.
`compiled.only_kept` finds out which are on disk.
"""
