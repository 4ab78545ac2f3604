"""Embedding bags: pooled lookup, merged gradients and the fused update of touched rows.

`bags` says what an operation works on, `reference` what it returns (plain jnp), `cpu` calls the compiled library that
`library` finds and loads. Where there is none, `jaxrec.embeddings.xla_engine` does the work with XLA's own operations.
"""
