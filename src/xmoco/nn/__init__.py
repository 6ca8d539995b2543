"""Networks: backbones, heads, batch norm variants, the encoder and its momentum copy."""
