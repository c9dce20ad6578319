"""Programs that are wrong on purpose, and programs that are right in another way.

`jax_bugs`, `torch_bugs`: mutants of the twins, declared with the rung that must catch each and the
config in which it shows; `lockstep.parity.catalogue` collects them. `torch_step` has those of the
step's stages, `torch_world` of several devices, `narrow_formats`, `torch_formats` and `jax_formats`
of narrow formats, `module_formats` of modules' formats. `jax_cuda`, `torch_cuda`: mutants that show
in a program for CUDA.
`jax_rewrites`, `torch_rewrites`: semantics-preserving variants. Each changes its twin for the life
of a process; nothing that trains knows of them.
"""
