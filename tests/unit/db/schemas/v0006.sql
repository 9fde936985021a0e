BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0006');
CREATE TABLE allowances (
	holder VARCHAR(16) NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	weight FLOAT NOT NULL, 
	max_queued_jobs INTEGER, 
	max_resident_jobs INTEGER, 
	max_host_bytes BIGINT, 
	max_stored_bytes BIGINT, 
	device_hours_per_week FLOAT, retained_bytes BIGINT, 
	PRIMARY KEY (holder, name)
);
INSERT INTO "allowances" VALUES('user','bob',2.0,7,NULL,NULL,NULL,1.5,NULL);
CREATE TABLE audit (
	number INTEGER NOT NULL, 
	time_s FLOAT NOT NULL, 
	user VARCHAR(63) NOT NULL, 
	token_id VARCHAR(16) NOT NULL, 
	origin VARCHAR(128) NOT NULL, 
	action VARCHAR(64) NOT NULL, 
	resource VARCHAR(256) NOT NULL, 
	outcome VARCHAR(64) NOT NULL, 
	detail TEXT NOT NULL, 
	PRIMARY KEY (number)
);
CREATE TABLE blob_references (
	sha256 VARCHAR(64) NOT NULL, 
	resource_id VARCHAR(32) NOT NULL, 
	PRIMARY KEY (sha256, resource_id)
);
INSERT INTO "blob_references" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','dataset_1');
INSERT INTO "blob_references" VALUES('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','dataset_1');
INSERT INTO "blob_references" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','dataset_2');
INSERT INTO "blob_references" VALUES('eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee','model_1');
INSERT INTO "blob_references" VALUES('cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc','model_1');
CREATE TABLE datasets (
	dataset_id VARCHAR(32) NOT NULL, 
	owner VARCHAR(63) NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	format VARCHAR(32) NOT NULL, 
	field_map JSON NOT NULL, 
	files JSON NOT NULL, 
	ready BOOLEAN NOT NULL, 
	num_rows BIGINT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	created_s FLOAT NOT NULL, 
	PRIMARY KEY (dataset_id), 
	UNIQUE (owner, name)
);
INSERT INTO "datasets" VALUES('dataset_1','ada','chats','messages','{"text": "body"}','[{"path": "b.jsonl", "sha256": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "size_bytes": 20}, {"path": "a.jsonl", "sha256": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "size_bytes": 10}]',1,30,'dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd',1790000010.0);
INSERT INTO "datasets" VALUES('dataset_2','bob','half','messages','{}','[{"path": "a.jsonl", "sha256": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "size_bytes": 10}]',0,0,'',1790000012.0);
CREATE TABLE events (
	job_id VARCHAR(32) NOT NULL, 
	sequence BIGINT NOT NULL, 
	time_s FLOAT NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (job_id, sequence), 
	FOREIGN KEY(job_id) REFERENCES jobs (job_id)
);
INSERT INTO "events" VALUES('job_1',1,1790000020.0,'{"kind":"state","job_state":"QUEUED","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_1',2,1790000021.0,'{"kind":"state","job_state":"PREPARING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_1',3,1790000022.0,'{"kind":"state","job_state":"STARTING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_1',4,1790000023.0,'{"kind":"state","job_state":"RUNNING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_1',5,1790000024.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":1,"loss":2.4,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":100,"tokens_per_second":50.0,"eta_s":18.0}');
INSERT INTO "events" VALUES('job_1',6,1790000025.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":2,"loss":2.3,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":200,"tokens_per_second":50.0,"eta_s":16.0}');
INSERT INTO "events" VALUES('job_1',7,1790000026.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":3,"loss":2.2,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":300,"tokens_per_second":50.0,"eta_s":14.0}');
INSERT INTO "events" VALUES('job_1',8,1790000027.0,'{"kind":"checkpoint","step":3,"duration_s":0.5,"size_bytes":1000,"eval_loss":null}');
INSERT INTO "events" VALUES('job_1',9,1790000029.0,'{"kind":"state","job_state":"SUCCEEDED","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_2',1,1790000033.0,'{"kind":"state","job_state":"QUEUED","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_2',2,1790000034.0,'{"kind":"state","job_state":"PREPARING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_2',3,1790000035.0,'{"kind":"state","job_state":"STARTING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_2',4,1790000036.0,'{"kind":"state","job_state":"RUNNING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_2',5,1790000037.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":1,"loss":2.4,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":100,"tokens_per_second":50.0,"eta_s":18.0}');
INSERT INTO "events" VALUES('job_2',6,1790000038.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":2,"loss":2.3,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":200,"tokens_per_second":50.0,"eta_s":16.0}');
INSERT INTO "events" VALUES('job_2',7,1790000039.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":3,"loss":2.2,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":300,"tokens_per_second":50.0,"eta_s":14.0}');
INSERT INTO "events" VALUES('job_2',8,1790000040.0,'{"kind":"checkpoint","step":3,"duration_s":0.5,"size_bytes":1000,"eval_loss":null}');
INSERT INTO "events" VALUES('job_3',1,1790000043.0,'{"kind":"state","job_state":"QUEUED","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_4',1,1790000048.0,'{"kind":"state","job_state":"QUEUED","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_4',2,1790000049.0,'{"kind":"state","job_state":"PREPARING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_4',3,1790000050.0,'{"kind":"state","job_state":"STARTING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_4',4,1790000051.0,'{"kind":"state","job_state":"RUNNING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_4',5,1790000052.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":1,"loss":2.4,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":100,"tokens_per_second":50.0,"eta_s":18.0}');
INSERT INTO "events" VALUES('job_4',6,1790000053.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":2,"loss":2.3,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":200,"tokens_per_second":50.0,"eta_s":16.0}');
INSERT INTO "events" VALUES('job_4',7,1790000054.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":3,"loss":2.2,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":300,"tokens_per_second":50.0,"eta_s":14.0}');
INSERT INTO "events" VALUES('job_4',8,1790000055.0,'{"kind":"checkpoint","step":3,"duration_s":0.5,"size_bytes":1000,"eval_loss":null}');
INSERT INTO "events" VALUES('job_4',9,1790000057.0,'{"kind":"state","job_state":"FAILED","reason":"WORKER_DIED","message":"killed by signal 9","attempt":0}');
INSERT INTO "events" VALUES('job_5',1,1790000061.0,'{"kind":"state","job_state":"QUEUED","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_5',2,1790000062.0,'{"kind":"state","job_state":"PREPARING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_5',3,1790000063.0,'{"kind":"state","job_state":"STARTING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_5',4,1790000064.0,'{"kind":"state","job_state":"RUNNING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_5',5,1790000065.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":1,"loss":2.4,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":100,"tokens_per_second":50.0,"eta_s":18.0}');
INSERT INTO "events" VALUES('job_5',6,1790000066.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":2,"loss":2.3,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":200,"tokens_per_second":50.0,"eta_s":16.0}');
INSERT INTO "events" VALUES('job_5',7,1790000067.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":3,"loss":2.2,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":300,"tokens_per_second":50.0,"eta_s":14.0}');
INSERT INTO "events" VALUES('job_5',8,1790000068.0,'{"kind":"checkpoint","step":3,"duration_s":0.5,"size_bytes":1000,"eval_loss":null}');
INSERT INTO "events" VALUES('job_5',9,1790000069.0,'{"kind":"state","job_state":"STOPPING","reason":"","message":"","attempt":0}');
INSERT INTO "events" VALUES('job_5',10,1790000070.0,'{"kind":"state","job_state":"PAUSED","reason":"PAUSED","message":"paused by a user","attempt":0}');
INSERT INTO "events" VALUES('job_4',10,1790000072.0,'{"kind":"state","job_state":"QUEUED","reason":"","message":"","attempt":0}');
CREATE TABLE grants (
	resource_id VARCHAR(32) NOT NULL, 
	project VARCHAR(63) NOT NULL, 
	granted_by VARCHAR(63) NOT NULL, 
	granted_s FLOAT NOT NULL, 
	PRIMARY KEY (resource_id, project)
);
CREATE TABLE jobs (
	number INTEGER NOT NULL, 
	job_id VARCHAR(32) NOT NULL, 
	owner VARCHAR(63) NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	spec JSON NOT NULL, 
	model_id TEXT NOT NULL, 
	dataset_id VARCHAR(32) NOT NULL, 
	eval_dataset_id VARCHAR(32) NOT NULL, 
	job_state VARCHAR(16) NOT NULL, 
	reason VARCHAR(64) NOT NULL, 
	message TEXT NOT NULL, 
	wanted VARCHAR(16) NOT NULL, 
	step BIGINT NOT NULL, 
	num_steps BIGINT NOT NULL, 
	attempt INTEGER NOT NULL, 
	created_s FLOAT NOT NULL, 
	started_s FLOAT NOT NULL, 
	ended_s FLOAT NOT NULL, 
	last_step TEXT NOT NULL, 
	"plan" JSON, 
	last_sequence BIGINT NOT NULL, data_report JSON, queue_order BIGINT DEFAULT '0' NOT NULL, project VARCHAR(63) DEFAULT '' NOT NULL, priority INTEGER DEFAULT '0' NOT NULL, queued_s FLOAT DEFAULT '0' NOT NULL, device_s FLOAT DEFAULT '0' NOT NULL, num_tokens BIGINT DEFAULT '0' NOT NULL, num_restarts INTEGER DEFAULT '0' NOT NULL, not_before_s FLOAT DEFAULT '0' NOT NULL, failed_step BIGINT DEFAULT '-1' NOT NULL, last_failure VARCHAR(80) DEFAULT '' NOT NULL, journal_line BIGINT DEFAULT '0' NOT NULL, deletion_s FLOAT, keep_files BOOLEAN DEFAULT '0' NOT NULL, 
	PRIMARY KEY (number), 
	UNIQUE (job_id)
);
INSERT INTO "jobs" VALUES(1,'job_1','ada','job1','{"name": "job1", "model": "tiny", "init_from": null, "dataset": "chats", "project": "lab", "eval_dataset": null, "method": "sft", "train": {"epochs": null, "max_steps": 10, "sequence_length": 64, "tokens_per_step": 128, "packing": "auto", "learning_rate": 1e-05, "lr_schedule": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.0, "lr_decay_ratio": 0.1, "weight_decay": 0.0, "decay": "trainer", "betas": [0.9, 0.999], "eps": 1e-08, "max_grad_norm": 1.0, "seed": 0, "train_on": "assistant", "compute_dtype": "auto", "compile": "auto", "max_skipped_steps": 10, "label_smoothing": 0.0, "lr_groups": [], "neftune_noise_alpha": 0.0, "matmul": "bf16", "trainable": ["all"]}, "eval_every_steps": 0, "checkpoint": {"every_steps": 500, "every_minutes": 60.0, "keep_last": 2, "keep_best": true, "dtype": "source", "keep_days": null, "keep_optimizer": "last"}, "priority": 0, "device": "auto", "eval_fraction": 0.0, "eval": {"patience": 0, "min_delta": 0.0}, "limits": {"max_hours": null, "max_steps": null}}','model_1','dataset_1','','SUCCEEDED','','','',3,10,1,1790000018.0,1790000016.0,1790000017.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":3,"loss":2.2,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":300,"tokens_per_second":50.0,"eta_s":14.0}','{"host_bytes": {"weights": 10, "moments": 20}, "device_bytes": {"arena": 5}, "host_limit_bytes": 1000, "device_limit_bytes": 500, "num_parameters": 1234, "device": "host", "compute_dtype": "bfloat16", "message": "", "hint": "", "prediction": null, "kept": null}',9,'{"rows": 30, "packed_rows": 12}',1,'lab',0,1790000018.0,6.0,270,0,0.0,-1,'',0,NULL,0);
INSERT INTO "jobs" VALUES(2,'job_2','bob','job2','{"name": "job2", "model": "tiny", "init_from": null, "dataset": "chats", "project": "", "eval_dataset": null, "method": "sft", "train": {"epochs": null, "max_steps": 10, "sequence_length": 64, "tokens_per_step": 128, "packing": "auto", "learning_rate": 1e-05, "lr_schedule": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.0, "lr_decay_ratio": 0.1, "weight_decay": 0.0, "decay": "trainer", "betas": [0.9, 0.999], "eps": 1e-08, "max_grad_norm": 1.0, "seed": 0, "train_on": "assistant", "compute_dtype": "auto", "compile": "auto", "max_skipped_steps": 10, "label_smoothing": 0.0, "lr_groups": [], "neftune_noise_alpha": 0.0, "matmul": "bf16", "trainable": ["all"]}, "eval_every_steps": 0, "checkpoint": {"every_steps": 500, "every_minutes": 60.0, "keep_last": 2, "keep_best": true, "dtype": "source", "keep_days": null, "keep_optimizer": "last"}, "priority": 0, "device": "auto", "eval_fraction": 0.0, "eval": {"patience": 0, "min_delta": 0.0}, "limits": {"max_hours": null, "max_steps": null}}','model_1','dataset_1','','RUNNING','','','',3,10,1,1790000031.0,1790000030.0,0.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":3,"loss":2.2,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":300,"tokens_per_second":50.0,"eta_s":14.0}','{"host_bytes": {"weights": 10, "moments": 20}, "device_bytes": {"arena": 5}, "host_limit_bytes": 1000, "device_limit_bytes": 500, "num_parameters": 1234, "device": "host", "compute_dtype": "bfloat16", "message": "", "hint": "", "prediction": null, "kept": null}',8,'{"rows": 30, "packed_rows": 12}',2,'bob',0,1790000031.0,6.0,270,0,0.0,-1,'',0,NULL,0);
INSERT INTO "jobs" VALUES(3,'job_3','bob','job3','{"name": "job3", "model": "tiny", "init_from": null, "dataset": "chats", "project": "", "eval_dataset": null, "method": "sft", "train": {"epochs": null, "max_steps": 10, "sequence_length": 64, "tokens_per_step": 128, "packing": "auto", "learning_rate": 1e-05, "lr_schedule": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.0, "lr_decay_ratio": 0.1, "weight_decay": 0.0, "decay": "trainer", "betas": [0.9, 0.999], "eps": 1e-08, "max_grad_norm": 1.0, "seed": 0, "train_on": "assistant", "compute_dtype": "auto", "compile": "auto", "max_skipped_steps": 10, "label_smoothing": 0.0, "lr_groups": [], "neftune_noise_alpha": 0.0, "matmul": "bf16", "trainable": ["all"]}, "eval_every_steps": 0, "checkpoint": {"every_steps": 500, "every_minutes": 60.0, "keep_last": 2, "keep_best": true, "dtype": "source", "keep_days": null, "keep_optimizer": "last"}, "priority": 0, "device": "auto", "eval_fraction": 0.0, "eval": {"patience": 0, "min_delta": 0.0}, "limits": {"max_hours": null, "max_steps": null}}','model_1','dataset_1','','QUEUED','','','',0,0,0,1790000041.0,0.0,0.0,'','null',1,'null',3,'bob',0,1790000041.0,0.0,0,0,0.0,-1,'',0,NULL,0);
INSERT INTO "jobs" VALUES(4,'job_4','ada','job4','{"name": "job4", "model": "tiny", "init_from": null, "dataset": "chats", "project": "lab", "eval_dataset": null, "method": "sft", "train": {"epochs": null, "max_steps": 10, "sequence_length": 64, "tokens_per_step": 128, "packing": "auto", "learning_rate": 1e-05, "lr_schedule": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.0, "lr_decay_ratio": 0.1, "weight_decay": 0.0, "decay": "trainer", "betas": [0.9, 0.999], "eps": 1e-08, "max_grad_norm": 1.0, "seed": 0, "train_on": "assistant", "compute_dtype": "auto", "compile": "auto", "max_skipped_steps": 10, "label_smoothing": 0.0, "lr_groups": [], "neftune_noise_alpha": 0.0, "matmul": "bf16", "trainable": ["all"]}, "eval_every_steps": 0, "checkpoint": {"every_steps": 500, "every_minutes": 60.0, "keep_last": 2, "keep_best": true, "dtype": "source", "keep_days": null, "keep_optimizer": "last"}, "priority": 0, "device": "auto", "eval_fraction": 0.0, "eval": {"patience": 0, "min_delta": 0.0}, "limits": {"max_hours": null, "max_steps": null}}','model_1','dataset_1','','QUEUED','','','',3,10,1,1790000046.0,1790000044.0,0.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":3,"loss":2.2,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":300,"tokens_per_second":50.0,"eta_s":14.0}','null',10,'null',4,'lab',0,1790000071.0,0.0,0,0,0.0,-1,'',0,NULL,0);
INSERT INTO "jobs" VALUES(5,'job_5','bob','job5','{"name": "job5", "model": "tiny", "init_from": null, "dataset": "chats", "project": "", "eval_dataset": null, "method": "sft", "train": {"epochs": null, "max_steps": 10, "sequence_length": 64, "tokens_per_step": 128, "packing": "auto", "learning_rate": 1e-05, "lr_schedule": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.0, "lr_decay_ratio": 0.1, "weight_decay": 0.0, "decay": "trainer", "betas": [0.9, 0.999], "eps": 1e-08, "max_grad_norm": 1.0, "seed": 0, "train_on": "assistant", "compute_dtype": "auto", "compile": "auto", "max_skipped_steps": 10, "label_smoothing": 0.0, "lr_groups": [], "neftune_noise_alpha": 0.0, "matmul": "bf16", "trainable": ["all"]}, "eval_every_steps": 0, "checkpoint": {"every_steps": 500, "every_minutes": 60.0, "keep_last": 2, "keep_best": true, "dtype": "source", "keep_days": null, "keep_optimizer": "last"}, "priority": 0, "device": "auto", "eval_fraction": 0.0, "eval": {"patience": 0, "min_delta": 0.0}, "limits": {"max_hours": null, "max_steps": null}}','/srv/models/tiny','dataset_1','','PAUSED','PAUSED','paused by a user','',3,10,1,1790000059.0,1790000058.0,0.0,'{"kind":"step","h2d":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"d2h":{"bytes":0,"busy_s":0.0,"exposed_s":0.0},"compute_s":0.0,"optimizer_s":0.5,"optimizer_exposed_s":0.0,"step":3,"loss":2.2,"grad_norm":1.0,"learning_rate":1e-05,"num_tokens":90,"duration_s":0.25,"overlap_ratio":1.0,"model_flops":0.0,"host_memory_bytes":{},"device_memory_bytes":{},"skipped":"","num_steps":10,"epoch":0.5,"num_input_tokens_seen":300,"tokens_per_second":50.0,"eta_s":14.0}','null',10,'null',5,'bob',0,1790000059.0,0.0,0,0,0.0,-1,'',0,NULL,0);
CREATE TABLE members (
	project VARCHAR(63) NOT NULL, 
	user VARCHAR(63) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	added_s FLOAT NOT NULL, 
	PRIMARY KEY (project, user)
);
INSERT INTO "members" VALUES('bob','bob','admin',1790000005.0);
CREATE TABLE models (
	model_id VARCHAR(32) NOT NULL, 
	owner VARCHAR(63) NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	files JSON NOT NULL, 
	ready BOOLEAN NOT NULL, 
	architecture VARCHAR(64) NOT NULL, 
	num_parameters BIGINT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	created_s FLOAT NOT NULL, 
	PRIMARY KEY (model_id), 
	UNIQUE (owner, name)
);
INSERT INTO "models" VALUES('model_1','ada','tiny','[{"path": "config.json", "sha256": "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc", "size_bytes": 5}, {"path": "model.safetensors", "sha256": "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee", "size_bytes": 100}]',1,'qwen3',1234,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff',1790000014.0);
CREATE TABLE node_condition (
	row_id INTEGER NOT NULL, 
	mode VARCHAR(16) NOT NULL, 
	message TEXT NOT NULL, 
	window_start_s FLOAT, 
	window_end_s FLOAT, 
	PRIMARY KEY (row_id)
);
CREATE TABLE requests (
	user VARCHAR(63) NOT NULL, 
	request_id VARCHAR(64) NOT NULL, 
	method VARCHAR(32) NOT NULL, 
	body_sha256 VARCHAR(64) NOT NULL, 
	resource_id VARCHAR(64) NOT NULL, 
	created_s FLOAT NOT NULL, 
	PRIMARY KEY (user, request_id)
);
INSERT INTO "requests" VALUES('ada','00000000-0000-0000-0000-000000000001','CreateDataset','45a29695d975a70d570d70566961f9017415a8c2d73819e0bd090268bc3d9e6e','dataset_1',1790000011.0);
INSERT INTO "requests" VALUES('bob','00000000-0000-0000-0000-000000000002','CreateDataset','12bc24cdf1c68a2578476496bd0ac5afbfda2ce44e81cf2c42930160e7c16a0f','dataset_2',1790000013.0);
INSERT INTO "requests" VALUES('ada','00000000-0000-0000-0000-000000000003','CreateModel','8dd59e64d0590c311a7c426e6bfa245ab90c8d8a4c237b25d4e87060510aa8a2','model_1',1790000015.0);
INSERT INTO "requests" VALUES('ada','00000000-0000-0000-0000-00000000000b','SubmitJob','dd018f44c48d7881205b7dfe54b9583c5a4fe44ca7692933fbaec9613164a3a1','job_1',1790000019.0);
INSERT INTO "requests" VALUES('bob','00000000-0000-0000-0000-00000000000c','SubmitJob','1709b0fb7fae6a571e9e3eb2630038483d5d30b9c21490f2648fdf603b478cde','job_2',1790000032.0);
INSERT INTO "requests" VALUES('bob','00000000-0000-0000-0000-00000000000d','SubmitJob','65166a495481bd786ba60b51f138c04658122571381bf2c17f5ff05ee61337cf','job_3',1790000042.0);
INSERT INTO "requests" VALUES('ada','00000000-0000-0000-0000-00000000000e','SubmitJob','433d7bd355bf6c0c2c55ec82594ca8aa8cb6c1d519a243982ce9b1f74561b187','job_4',1790000047.0);
INSERT INTO "requests" VALUES('bob','00000000-0000-0000-0000-00000000000f','SubmitJob','020b9ed19f8d6eebc3378acb5cabaca2a1e94431f4bf43882e232d9187570080','job_5',1790000060.0);
CREATE TABLE share_uses (
	project VARCHAR(63) NOT NULL, 
	user VARCHAR(63) NOT NULL, 
	device_s FLOAT NOT NULL, 
	as_of_s FLOAT NOT NULL, 
	PRIMARY KEY (project, user)
);
CREATE TABLE state_folder (
	state_id VARCHAR(32) NOT NULL, 
	num_checks BIGINT NOT NULL, 
	PRIMARY KEY (state_id)
);
INSERT INTO "state_folder" VALUES('60e830f29bb953af',0);
CREATE TABLE tokens (
	token_id VARCHAR(16) NOT NULL, 
	user VARCHAR(63) NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	created_s FLOAT NOT NULL, 
	expires_s FLOAT, 
	revoked_s FLOAT, scope VARCHAR(16) DEFAULT 'full' NOT NULL, label VARCHAR(63) DEFAULT '' NOT NULL, created_by VARCHAR(63) DEFAULT '' NOT NULL, last_used_s FLOAT, 
	PRIMARY KEY (token_id), 
	FOREIGN KEY(user) REFERENCES users (name), 
	UNIQUE (sha256)
);
INSERT INTO "tokens" VALUES('tok_1','ada','1111111111111111111111111111111111111111111111111111111111111111',1790000007.0,NULL,NULL,'full','','',NULL);
INSERT INTO "tokens" VALUES('tok_2','bob','2222222222222222222222222222222222222222222222222222222222222222',1790000008.0,1797776008.0,1790000009.0,'full','','',NULL);
CREATE TABLE usage_hours (
	hour_s BIGINT NOT NULL, 
	project VARCHAR(63) NOT NULL, 
	user VARCHAR(63) NOT NULL, 
	device_s FLOAT NOT NULL, 
	num_tokens BIGINT NOT NULL, 
	PRIMARY KEY (hour_s, project, user)
);
CREATE TABLE users (
	name VARCHAR(63) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	project VARCHAR(63) NOT NULL, 
	created_s FLOAT NOT NULL, disabled_s FLOAT, 
	PRIMARY KEY (name)
);
INSERT INTO "users" VALUES('ada','admin','lab',1790000003.0,NULL);
INSERT INTO "users" VALUES('bob','user','bob',1790000005.0,NULL);
INSERT INTO "users" VALUES('carol','viewer','lab',1790000006.0,NULL);
CREATE INDEX jobs_by_owner ON jobs (owner, number);
CREATE INDEX jobs_in_queue ON jobs (job_state, queue_order);
CREATE INDEX jobs_by_queue_order ON jobs (queue_order);
CREATE INDEX jobs_by_name ON jobs (name, number);
CREATE INDEX ix_blob_references_resource_id ON blob_references (resource_id);
CREATE INDEX jobs_by_end ON jobs (ended_s);
CREATE INDEX jobs_by_rank ON jobs (job_state, project, owner, priority, queue_order);
CREATE INDEX jobs_by_project ON jobs (project, number);
CREATE INDEX jobs_by_deletion ON jobs (deletion_s);
CREATE INDEX tokens_by_user ON tokens (user);
CREATE INDEX datasets_by_age ON datasets (created_s, dataset_id, owner);
CREATE INDEX models_by_age ON models (created_s, model_id, owner);
CREATE INDEX members_by_user ON members (user);
CREATE INDEX grants_by_project ON grants (project);
CREATE INDEX audit_by_time ON audit (time_s);
CREATE INDEX audit_by_user ON audit (user, time_s);
COMMIT;
