"""All that changes a number: rows, decoder, attention, loss, adapters, optimizer, the loop."""
