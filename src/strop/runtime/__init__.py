"""Where a run is put together and supervised: the pipeline, replay."""
