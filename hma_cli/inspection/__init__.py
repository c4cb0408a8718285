"""What a hand-over of one request will move, computed offline by the code that the connector runs."""
