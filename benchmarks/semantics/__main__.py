"""`python -m benchmarks.semantics` prints the figures of docs/semantics.md."""

import jax

from benchmarks.semantics import measure, table, versions

jax.config.update("jax_platforms", "cpu")
print(table(measure()), versions(), sep="\n\n")
