"""What a run of a given size needs: cores, memory, network, disk."""
