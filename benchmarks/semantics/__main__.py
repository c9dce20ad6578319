"""`python -m benchmarks.semantics` prints the table of docs/semantics.md."""

import jax

from benchmarks.semantics import rows, table, versions

jax.config.update("jax_platforms", "cpu")
print(table(list(rows())), versions(), sep="\n\n")
