"""Pure planners: tensors to tiers, layers to devices, split points and what each costs."""
