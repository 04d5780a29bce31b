"""MeshFunctions: what `fit`, `evaluate` and `predict` call, where the distribution makes it and not Keras."""

from keras_qwen.ops.placement import compiled, placed, step_function


class MeshFunctions:
    """Mixin of `QwenModel`, in front of `keras.Model`: a distribution may have another way to run a step."""

    _call_graph = None

    def called(self, call, inputs, training):
        """`call(inputs, training=training)`, on a mesh that needs it as a graph, which is kept for the next time."""
        made = compiled(lambda inputs: call(inputs, training=training))
        if made is None:
            return call(inputs, training=training)
        inputs = {name: x if x is None else placed(x, "batch", "length") for name, x in inputs.items()}
        if training:  # whose dropout draws other numbers each time
            return made(inputs)
        if self.has_changed("call") or self._call_graph is None:
            self._call_graph = made
        return self._call_graph(inputs)

    def make_train_function(self, force=False):
        made = step_function(self, self.train_step, trains=True)
        if made is None:
            return super().make_train_function(force)
        if self.train_function is None or force:
            self.train_function = made
        return self.train_function

    def make_test_function(self, force=False):
        made = step_function(self, self.test_step)
        if made is None:
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = made
        return self.test_function

    def make_predict_function(self, force=False):
        made = step_function(self, self.predict_step)
        if made is None:
            return super().make_predict_function(force)
        if self.predict_function is None or force:
            self.predict_function = lambda batches: made(iter(batches))
        return self.predict_function
