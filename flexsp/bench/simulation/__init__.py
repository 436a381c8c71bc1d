"""`flexsp simulate`: exchanges over many ranks, event by event, from what few ranks were measured to take."""
