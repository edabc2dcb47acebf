"""Text and tokens: chat formats, dialogues, encoded prompts and responses."""
