"""Programs that are wrong on purpose, and programs that are right in another way.

`jax_bugs`, `torch_bugs`: mutants of the twins, one for each entry of `lockstep.parity.catalogue`;
`torch_step` has those of the step's stages, `torch_formats` those of narrow formats,
`module_formats` those of modules' own, in both twins.
`jax_rewrites`, `torch_rewrites`: semantics-preserving variants. Each changes its twin for the life
of a process; nothing that trains knows of them.
"""
