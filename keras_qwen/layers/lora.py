"""Adapters: small trained changes to a layer's frozen weight, several of them by name, at most one of them active."""

import contextlib

import keras
from keras import ops

from keras_qwen import keras_private
from keras_qwen.ops.attention_dense import as_seed
from keras_qwen.ops.low_rank import add_low_rank
from keras_qwen.ops.row_matmul import row_matmul
from keras_qwen.parameters import adapter_layer_name


class Adaptable:
    """Mixin of a Keras layer whose one weight matrix adapters may change.

    All they do with the matrix goes through `full_kernel`, `replace_kernel` and `restore_kernel`, which a layer that
    keeps it in another form than that of a variable overrides.

    Attributes:
        weight_name: name of the matrix, as the layer's attribute and in its variable's path.
        adapters: {name: `LoRA` or `Replacement`}.
        active_adapter: name of the one that the layer computes with; None for the layer as it is.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.adapters = {}
        self.active_adapter = None

    @property
    def adapter(self):
        """The active adapter; None without one."""
        return self.adapters.get(self.active_adapter)

    @property
    def current_weight(self):
        """The variable with the matrix, or an active `Replacement`'s copy."""
        replaced = getattr(self.adapter, "value", None)
        return getattr(self, self.weight_name) if replaced is None else replaced

    def full_kernel(self):
        """The matrix as one tensor in the variables' dtype."""
        return ops.convert_to_tensor(getattr(self, self.weight_name))

    def replace_kernel(self, value):
        """Puts a matrix in the place of the one there is, of which it returns what `restore_kernel` needs."""
        weight = getattr(self, self.weight_name)
        before = ops.copy(weight)
        weight.assign(value)
        return before

    def restore_kernel(self, before):
        """Takes back `replace_kernel`, bit for bit."""
        getattr(self, self.weight_name).assign(before)

    def add_adapter(self, name, adapter):
        """Builds an adapter for this layer and keeps it under a name; it becomes active by `active_adapter`."""
        with keras_private.unlocked(self), keras.name_scope(self.name, caller=self):
            adapter.build_for(self)
            self.adapters[name] = adapter

    def remove_adapter(self, name):
        """Forgets an adapter."""
        with keras_private.unlocked(self):
            self.adapters.pop(name)


class LoRA(keras.layers.Layer):
    """A change of low rank to a projection's frozen kernel W: `x W + s (x A) B`, and with DoRA each column rescaled.

    The frozen kernel is only multiplied with, so that it never gets a gradient. The variables are float32 whatever the
    dtype policy, and are cast to the dtype of the inputs for the two small products.

    With `use_dora` the result is multiplied by `magnitude / ||W + s A B||`, column by column. The norm counts as a
    constant in the gradient, and comes from products of A and B with W: there is never a second array like W.

    Args:
        rank: size r of the change: A is (inputs, r), B (r, units).
        scale: s, usually alpha / rank.
        dropout: rate at which inputs of the change are dropped while training.
        use_dora: whether to train a magnitude for each column, too.

    References: Hu et al., 2021, "LoRA", arXiv:2106.09685; Liu et al., 2024, "DoRA", arXiv:2402.09353.
    """

    def __init__(self, rank, scale, dropout=0.0, use_dora=False, **kwargs):
        super().__init__(**kwargs)
        self.rank, self.scale, self.dropout, self.use_dora = rank, scale, dropout, use_dora
        self.seed_generator = None
        self.seed = None  # of the call that is running, where it was drawn before

    def build_for(self, projection):
        """Makes the variables for a projection; A random as `torch.nn.Linear` is, B zero: nothing changes at first."""
        inputs, units = projection.input_spec.axes[-1], projection.units
        uniform = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        with keras.name_scope(self.name, caller=self):
            if self.dropout:
                self.seed_generator = keras.random.SeedGenerator()
            self.A = self._add("A", (inputs, self.rank), uniform)
            self.B = self._add("B", (self.rank, units), "zeros")
            if self.use_dora:
                squares = lambda *_, **__: _column_squares(projection.full_kernel())  # noqa: E731
                self.kernel_squares = self._add("kernel_squares", (units,), squares, trainable=False)
                self.magnitude = self._add("magnitude", (units,), lambda *_, **__: ops.sqrt(squares()))
        self.built = True

    def _add(self, name, shape, initializer, trainable=True):
        return self.add_weight(
            name=name, shape=shape, initializer=initializer, trainable=trainable, dtype="float32", autocast=False
        )

    def product(self, inputs, base_product, training=False, made_by=None, made_from=()):
        """`inputs` times the changed kernel.

        Args:
            inputs: tensor (..., inputs).
            base_product: function that multiplies with the frozen kernel.
            training: whether dropout is on.
            made_by, made_from: as of `Projection`.

        Returns:
            Tensor (..., units).
        """
        outputs = base_product(inputs)
        a, b = ops.cast(self.A, inputs.dtype), ops.cast(self.B, inputs.dtype)
        if not (training and self.dropout):
            outputs = add_low_rank(outputs, inputs, a, b, self.scale, made_by, made_from)
            return _multiply(outputs, self._rescaling(base_product, inputs.dtype)) if self.use_dora else outputs
        kept = keras.random.dropout(
            inputs, self.dropout, seed=as_seed(self.seed_generator if self.seed is None else self.seed)
        )
        if not self.use_dora:
            return add_low_rank(outputs, kept, a, b, self.scale)
        # As in PEFT: what is dropped is dropped from the rescaled part of the frozen product, too.
        of_kept = base_product(kept)
        changed = add_low_rank(of_kept, kept, a, b, self.scale)
        return outputs + _multiply(changed, self._rescaling(base_product, inputs.dtype)) - of_kept

    def merged(self, kernel):
        """The kernel with the change in it.

        Args:
            kernel: tensor (inputs, units); the sum is computed in float32 and cast to its dtype.
        """
        wide = ops.cast(kernel, "float32")
        changed = wide + ops.matmul(self.A * self.scale, self.B)
        if self.use_dora:
            changed = changed * self._rescaling(lambda rows: ops.matmul(rows, wide), "float32")
        return ops.cast(changed, kernel.dtype)

    def _rescaling(self, base_product, dtype):
        """`magnitude / ||W + s A B||` of each column, where ||W + s A B||^2 = ||W||^2 + 2 s W.AB + s^2 ||A B||^2."""
        a, b = (ops.stop_gradient(ops.convert_to_tensor(x)) for x in (self.A, self.B))
        crossed = ops.cast(ops.stop_gradient(base_product(ops.cast(ops.transpose(a), dtype))), "float32")
        inner = ops.matmul(ops.matmul(ops.transpose(a), a), b) * self.scale + 2.0 * crossed
        squares = ops.convert_to_tensor(self.kernel_squares) + self.scale * ops.sum(b * inner, axis=0)
        return self.magnitude * ops.rsqrt(ops.maximum(squares, 1e-30))


class Replacement(keras.layers.Layer):
    """A trained copy, in float32, of a layer's whole weight; PEFT's `modules_to_save`.

    Args:
        ties_head: of a tied embedding, whether the head takes the copy as well.
    """

    def __init__(self, ties_head=True, **kwargs):
        super().__init__(**kwargs)
        self.ties_head = ties_head

    def build_for(self, layer):
        """Makes the copy."""
        copied = lambda shape, dtype=None: ops.copy(ops.cast(layer.full_kernel(), dtype))  # noqa: E731
        with keras.name_scope(self.name, caller=self):
            shape = getattr(layer, layer.weight_name).shape
            self.value = self.add_weight(
                name=layer.weight_name, shape=shape, dtype="float32", initializer=copied, autocast=False
            )
        self.built = True

    def product(self, inputs, base_product, training=False, made_by=None, made_from=()):
        """`inputs` times the copy."""
        return row_matmul(inputs, ops.cast(self.value, inputs.dtype))

    def merged(self, kernel):
        """The copy, in the dtype of what it takes the place of."""
        return ops.cast(ops.convert_to_tensor(self.value), kernel.dtype)


def make_lora(name, rank, scale, dropout, use_dora):
    """A `LoRA` with the layer name that its variables' paths need."""
    return LoRA(rank, scale, dropout, use_dora, name=adapter_layer_name(name), dtype="float32")


def make_replacement(name, ties_head=True):
    """A `Replacement` with the layer name that its variables' paths need."""
    return Replacement(ties_head, name=adapter_layer_name(name), dtype="float32")


@contextlib.contextmanager
def dropout_seeds(layers, training):
    """Inside, the active adapters of the layers drop by seeds that are drawn now.

    Drawn outside of what a backward pass recomputes, they are the same the second time; see `repeatable`.
    """
    dropping = _dropping(layers) if training else []
    _set_seeds((adapter, adapter.seed_generator.next()) for adapter in dropping)
    try:
        yield
    finally:
        _set_seeds((adapter, None) for adapter in dropping)


def repeatable(function, layers):
    """A function whose later calls drop what a call now would: on TensorFlow the backward pass calls it once more."""
    seeds = [(adapter, adapter.seed) for adapter in _dropping(layers) if adapter.seed is not None]

    def call(*inputs):
        before = [(adapter, adapter.seed) for adapter, _ in seeds]
        _set_seeds(seeds)
        try:
            return function(*inputs)
        finally:
            _set_seeds(before)

    return call if seeds else function


def _dropping(layers):
    return [layer.adapter for layer in layers if getattr(layer.adapter, "dropout", 0)]


def _set_seeds(seeds):
    for adapter, seed in seeds:
        adapter.seed = seed


def _column_squares(kernel):
    return ops.sum(ops.square(ops.cast(kernel, "float32")), axis=0)


def _multiply(outputs, columns):
    """The product in float32: a factor near 1 has few digits in half precision."""
    return ops.cast(ops.cast(outputs, "float32") * columns, outputs.dtype)
