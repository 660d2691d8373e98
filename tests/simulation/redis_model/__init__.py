"""Model of a Redis server: commands, functions in Lua, durability, and connections that fail."""
