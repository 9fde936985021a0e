"""The RAM-centric streaming engine. Knows tensors only: no job, user, wire or database.

Weights, moments and gradients live in a host store; a device computes with one unit of the model at a time. Ten lines
drive it::

    template = Template.from_folder(folder)                        # structure of any Hugging Face decoder, no storage
    store = HostStore.allocate(template.layout)                    # 12 bytes a parameter, and 4 for gradients
    load_model(store, folder)                                      # store.model_load: safetensors into the store
    device = HostDevice(num_threads=2)
    recipe = Recipe(learning_rate=1e-5, warmup_steps=10)           # what changes the result; Execution: what does not
    trainer = Trainer(template, store, device, recipe, Execution(), num_steps=plan.num_steps)
    for index in range(plan.num_steps):                            # plan: engine.data.StepPlan, or lists of MicroBatch
        report = trainer.train_step(plan.step(index))
    trainer.close()                                                # waits for the last update; then save_checkpoint
    device.close()

Reading order: `trainer`, `forward_backward`, `head_pass`, `objectives`, `layer_stream`, `gradient_sink`, `optimizer`,
`template`, `device.protocol`.
"""
