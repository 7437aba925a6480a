"""What several commands share: prompts, output, tiers, and the start of models and processes."""
