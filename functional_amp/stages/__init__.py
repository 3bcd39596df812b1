"""What a step does, stage by stage."""
