"""What every script computes: rows, decoder, attention, loss, optimizer, the loop."""
