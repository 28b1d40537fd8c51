"""How models of different makers write what they think, say and call: recognised by their chat templates."""
