"""Values beside the tokens of a group: columns, versions by token, metadata."""
