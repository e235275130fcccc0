"""Tasks of models that other libraries train: scikit-learn, PyTorch Lightning and Hugging Face transformers.

    sklearn       linear models and multilayer perceptrons of scikit-learn
    lightning     a LightningModule, trained by Lightning's Trainer
    transformers  a model of transformers, trained by its Trainer, also with LoRA of peft

Each has a function `task`, which returns an `AdaptedTask`. A task's file takes it apart, so that the file's own digest
covers all of it:

    model, data, loss, metrics, train = sklearn.task(SGDClassifier(), read, features=64, classes=range(10))

A parameter of the library that `[local]` of the plan decides (a learning rate, epochs, a batch size) must keep its
default. Any other value is refused.

Invariant, tested: these modules import nothing but the standard library, numpy, torch and `thinwire.client.train`. A
library is imported inside a function, so nobody needs those that he does not use.
"""
