"""How the tiny base that ships with strop was made: ``make base`` runs ``corpus``, ``tokenizer``, ``pretrain`` and ``gate``."""
