"""The paper's tables, measured: configurations × seeds become records, and records tables."""
