"""Published weights on their way to engines without a shared folder: manifest, verified download, the engine's side."""
