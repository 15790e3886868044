"""The public configuration classes; `ejkernel.modules.operations.configs` re-exports them."""
