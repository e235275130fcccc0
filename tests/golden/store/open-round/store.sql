BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0001_initial');
CREATE TABLE alerts (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	kind VARCHAR(40) NOT NULL, 
	subject VARCHAR(80) NOT NULL, 
	sentence TEXT NOT NULL, 
	hint TEXT NOT NULL, 
	opened_at DOUBLE NOT NULL, 
	closed_at DOUBLE, 
	acknowledged_by TEXT NOT NULL, 
	acknowledged_at DOUBLE, 
	opening_sent_at DOUBLE, 
	closing_sent_at DOUBLE, 
	failures BIGINT NOT NULL, 
	failure TEXT NOT NULL, 
	sent_to VARCHAR(40) NOT NULL, 
	due_at DOUBLE NOT NULL
);
CREATE TABLE checkpoints (
	run_id VARCHAR(80) NOT NULL, 
	version INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	file TEXT NOT NULL, 
	parts JSON NOT NULL, 
	counters JSON NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (run_id, version), 
	CONSTRAINT fk_checkpoints_run_id FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "checkpoints" VALUES('toy-1',0,'4c03e7aa43d28d884dc0c9692983b03173a626ca3b0881b7cd9e0879c820792f','v000000.model','[["full/0",2494,"630e80ed0116c284227befcae2d28c0db1b00b12041d662c4a674bb233d6fd69"]]','{}',1.79602548583037900922e+09);
INSERT INTO "checkpoints" VALUES('toy-1',1,'7d0a395fe319744a01e95e3858a45979fbd77afae8d7b1b667f9598a200af987','v000001.model','[["full/0",2494,"193e366a711020f9d994df92170c991e8e62313a763fa42578bc1b5d41a7a004"]]','{}',1700000003.0);
CREATE TABLE clients (
	run_id VARCHAR(80) NOT NULL, 
	device VARCHAR(63) NOT NULL, 
	selected BIGINT NOT NULL, 
	arrived BIGINT NOT NULL, 
	sequence BIGINT NOT NULL, 
	times_slowest BIGINT DEFAULT '0' NOT NULL, 
	times_silent BIGINT DEFAULT '0' NOT NULL, 
	last_outcome TEXT NOT NULL, 
	last_at DOUBLE, 
	payload_up BIGINT NOT NULL, 
	payload_down BIGINT NOT NULL, 
	wire_up BIGINT, 
	wire_down BIGINT, 
	aggregated_count BIGINT NOT NULL, 
	late BIGINT NOT NULL, 
	dropped BIGINT NOT NULL, 
	failed BIGINT NOT NULL, 
	CONSTRAINT pk_clients PRIMARY KEY (run_id, device), 
	CONSTRAINT fk_clients_run_id FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "clients" VALUES('toy-1','a',2,2,2,0,0,'accepted',1700000004.0,286,4988,NULL,NULL,1,0,0,0);
INSERT INTO "clients" VALUES('toy-1','b',2,1,1,0,0,'aggregated',1700000002.0,143,4988,NULL,NULL,1,0,0,0);
INSERT INTO "clients" VALUES('toy-1','c',2,1,1,1,0,'aggregated',1700000003.0,143,4988,NULL,NULL,1,0,0,0);
CREATE TABLE commands (
	id INTEGER NOT NULL, 
	kind VARCHAR(40) NOT NULL, 
	run_id TEXT NOT NULL, 
	args JSON NOT NULL, 
	who TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	answered_at DOUBLE, 
	result JSON, 
	CONSTRAINT pk_commands PRIMARY KEY (id)
);
CREATE TABLE device_actions (
	id INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	who TEXT NOT NULL, 
	device TEXT NOT NULL, 
	what VARCHAR(16) NOT NULL, 
	detail TEXT NOT NULL, 
	CONSTRAINT pk_device_actions PRIMARY KEY (id)
);
INSERT INTO "device_actions" VALUES(1,1700000000.0,'a','a','enrol','loopback, approved');
INSERT INTO "device_actions" VALUES(2,1700000000.0,'b','b','enrol','loopback, approved');
INSERT INTO "device_actions" VALUES(3,1700000000.0,'c','c','enrol','loopback, approved');
INSERT INTO "device_actions" VALUES(4,1700000000.0,'waits','waits','enrol','manual, pending');
CREATE TABLE devices (
	name VARCHAR(63) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	public_key BLOB NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	how VARCHAR(16) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	change BIGINT NOT NULL, 
	online BOOLEAN NOT NULL, 
	seen_at DOUBLE, 
	last_seen_at DOUBLE, 
	hello JSON NOT NULL, 
	booked JSON DEFAULT '{}' NOT NULL, 
	other_keys JSON DEFAULT '[]' NOT NULL, 
	brought JSON DEFAULT '{}' NOT NULL, 
	tags JSON DEFAULT '[]' NOT NULL, 
	CONSTRAINT pk_devices PRIMARY KEY (name), 
	CONSTRAINT uq_devices_fingerprint UNIQUE (fingerprint)
);
INSERT INTO "devices" VALUES('a','5342575e285bf74f11bd1bebbbfa8d26b924a93c7152049bcedc43e0386ae6f9',X'6E6F742061206B65792C20627574206F662061','approved','loopback',1700000000.0,1,0,1700000000.0,NULL,'{"name":"a","process":"p1","tasks":[{"name":"toy","version":"","source_digest":"","layout_digest":"96db6763e414b64c6270643b7f2ddfcb1b20dedd4bcc248c88e6b49aea4cca04","codecs":[],"error":"","tensors":""}],"versions":{"thinwire":"0.1.0"},"protocol":1,"oldest":1,"link":{},"trusted_pins":[],"plans":[],"has":{"cores":null,"memory_bytes":null,"free_bytes":null,"mains":null,"metered":null},"open_runs":{},"secure":[],"booked":{},"booked_head":"","booked_keys":[]}','{}','[]','{}','[]');
INSERT INTO "devices" VALUES('b','625bdf4da05bc76c774601bc60246085ea357aaaf98dd5be518ac3fa998d4df7',X'6E6F742061206B65792C20627574206F662062','approved','loopback',1700000000.0,2,0,1700000000.0,NULL,'{"name":"b","process":"p1","tasks":[{"name":"toy","version":"","source_digest":"","layout_digest":"96db6763e414b64c6270643b7f2ddfcb1b20dedd4bcc248c88e6b49aea4cca04","codecs":[],"error":"","tensors":""}],"versions":{"thinwire":"0.1.0"},"protocol":1,"oldest":1,"link":{},"trusted_pins":[],"plans":[],"has":{"cores":null,"memory_bytes":null,"free_bytes":null,"mains":null,"metered":null},"open_runs":{},"secure":[],"booked":{},"booked_head":"","booked_keys":[]}','{}','[]','{}','[]');
INSERT INTO "devices" VALUES('c','cd2d1efd254dc324ec379fbba9d8189dda02abcb765b844c698daca01b845cae',X'6E6F742061206B65792C20627574206F662063','approved','loopback',1700000000.0,3,0,1700000000.0,NULL,'{"name":"c","process":"p1","tasks":[{"name":"toy","version":"","source_digest":"","layout_digest":"96db6763e414b64c6270643b7f2ddfcb1b20dedd4bcc248c88e6b49aea4cca04","codecs":[],"error":"","tensors":""}],"versions":{"thinwire":"0.1.0"},"protocol":1,"oldest":1,"link":{},"trusted_pins":[],"plans":[],"has":{"cores":null,"memory_bytes":null,"free_bytes":null,"mains":null,"metered":null},"open_runs":{},"secure":[],"booked":{},"booked_head":"","booked_keys":[]}','{}','[]','{}','[]');
INSERT INTO "devices" VALUES('waits','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',X'6E6F722074686973','pending','manual',1700000000.0,4,0,NULL,NULL,'{}','{}','[]','{}','[]');
CREATE TABLE invitations (
	id INTEGER NOT NULL, 
	secret_hash VARCHAR(64) NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	approve_manually BOOLEAN NOT NULL, 
	who TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	used_by VARCHAR(63) NOT NULL, 
	used_key VARCHAR(64) NOT NULL, 
	used_at DOUBLE, 
	withdrawn_at DOUBLE, 
	CONSTRAINT pk_invitations PRIMARY KEY (id), 
	CONSTRAINT uq_invitations_secret_hash UNIQUE (secret_hash)
);
CREATE TABLE journal (
	seq INTEGER NOT NULL, 
	run_id VARCHAR(80), 
	at DOUBLE NOT NULL, 
	kind VARCHAR(40) NOT NULL, 
	body JSON NOT NULL, 
	CONSTRAINT pk_journal PRIMARY KEY (seq), 
	CONSTRAINT fk_journal_run_id FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "journal" VALUES(1,'toy-1',1.79602548583037900922e+09,'ModelStored','{"at":1796025485.830379,"version":0,"digest":"4c03e7aa43d28d884dc0c9692983b03173a626ca3b0881b7cd9e0879c820792f","file":"v000000.model","parts":[["full/0",2494,"630e80ed0116c284227befcae2d28c0db1b00b12041d662c4a674bb233d6fd69"]],"counters":{},"state":""}');
INSERT INTO "journal" VALUES(2,'toy-1',1.79602548583037900922e+09,'RunStatusChanged','{"at":1796025485.830379,"status":"queued","text":"in the queue","exit_code":0}');
INSERT INTO "journal" VALUES(3,'toy-1',1700000000.0,'RunStatusChanged','{"at":1700000000.0,"status":"running","text":"round 1, step 1 of 4","exit_code":0}');
INSERT INTO "journal" VALUES(4,'toy-1',1700000000.0,'RoundOpened','{"at":1700000000.0,"round":1,"elapsed_s":0.0,"base_version":0,"base_digest":"4c03e7aa43d28d884dc0c9692983b03173a626ca3b0881b7cd9e0879c820792f","added":["a","b","c"],"assignments":{"a":"toy-1.1.a","b":"toy-1.1.b","c":"toy-1.1.c"},"codec":"topk(0.1) > int8","deadline_s":30.0,"target_updates":3,"min_updates":2,"reasons":{},"references_from":0,"deadline_reason":[["planned",{}]],"codecs":{},"codec_reasons":{},"standings":{},"later":[],"sampling":[],"removed":[],"considered":3,"device_s":0.0}');
INSERT INTO "journal" VALUES(5,'toy-1',1700000000.0,'ClientSelected','{"at":1700000000.0,"round":1,"device":"a","assignment_id":"toy-1.1.a","payload_bytes":2494,"elapsed_s":0.0,"base_version":0,"deadline_s":0.0,"why":[],"instead_of":"","steps":0,"batch":0,"work_reason":[],"codec":"","codec_reason":[],"evaluates":true}');
INSERT INTO "journal" VALUES(6,'toy-1',1700000000.0,'ClientSelected','{"at":1700000000.0,"round":1,"device":"b","assignment_id":"toy-1.1.b","payload_bytes":2494,"elapsed_s":0.0,"base_version":0,"deadline_s":0.0,"why":[],"instead_of":"","steps":0,"batch":0,"work_reason":[],"codec":"","codec_reason":[],"evaluates":true}');
INSERT INTO "journal" VALUES(7,'toy-1',1700000000.0,'ClientSelected','{"at":1700000000.0,"round":1,"device":"c","assignment_id":"toy-1.1.c","payload_bytes":2494,"elapsed_s":0.0,"base_version":0,"deadline_s":0.0,"why":[],"instead_of":"","steps":0,"batch":0,"work_reason":[],"codec":"","codec_reason":[],"evaluates":true}');
INSERT INTO "journal" VALUES(8,'toy-1',1700000001.0,'UpdateAccepted','{"at":1700000001.0,"round":1,"assignment_round":1,"device":"a","assignment_id":"toy-1.1.a","update_id":"toy-1/a/1","staleness":0,"discount":1.0,"late":false,"elapsed_s":1.0,"header":{"assignment_id":"toy-1.1.a","update_id":"toy-1/a/1","base_version":0,"examples":10,"steps":5,"a":5.0,"norm":0.0,"metrics":{"eval/loss":[0.0,1.0]},"timings":{"download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":1.0,"encode_s":0.0,"load_s":0.0,"commit_s":0.0},"parts":[{"name":"frame/0","length":143,"sha256":"52945611afd7ec3d14ea3a89a9ad868fe8ab09fd6ae96c7fd4eb5352266e071d","offset":0}],"codec":"topk(0.1) > int8","counters":{},"residual_norm":0.0,"protocol":1,"transfer":{"pulled_at":1700000000.0,"began_at":1700000001.0,"arrived_at":1700000001.0,"sent_bytes":null,"received_bytes":null,"requests":0},"identity":"5a9770e05dcd50b1","type":"reply"},"ignored":0}');
INSERT INTO "journal" VALUES(9,'toy-1',1700000001.0,'UpdateAggregated','{"at":1700000001.0,"round":1,"update_id":"toy-1/a/1","aggregate_s":0.0010128260037163273}');
INSERT INTO "journal" VALUES(10,'toy-1',1700000002.0,'UpdateAccepted','{"at":1700000002.0,"round":1,"assignment_round":1,"device":"b","assignment_id":"toy-1.1.b","update_id":"toy-1/b/1","staleness":0,"discount":1.0,"late":false,"elapsed_s":2.0,"header":{"assignment_id":"toy-1.1.b","update_id":"toy-1/b/1","base_version":0,"examples":10,"steps":5,"a":5.0,"norm":0.0,"metrics":{"eval/loss":[0.0,1.0]},"timings":{"download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":2.0,"encode_s":0.0,"load_s":0.0,"commit_s":0.0},"parts":[{"name":"frame/0","length":143,"sha256":"7e81f1c6a74b17d94f1a4cca4d33de7c1030954579c6caebb9cb06bb32ed0c92","offset":0}],"codec":"topk(0.1) > int8","counters":{},"residual_norm":0.0,"protocol":1,"transfer":{"pulled_at":1700000000.0,"began_at":1700000002.0,"arrived_at":1700000002.0,"sent_bytes":null,"received_bytes":null,"requests":0},"identity":"5a9770e05dcd50b1","type":"reply"},"ignored":0}');
INSERT INTO "journal" VALUES(11,'toy-1',1700000002.0,'UpdateAggregated','{"at":1700000002.0,"round":1,"update_id":"toy-1/b/1","aggregate_s":0.0006905379996169358}');
INSERT INTO "journal" VALUES(12,'toy-1',1700000003.0,'UpdateAccepted','{"at":1700000003.0,"round":1,"assignment_round":1,"device":"c","assignment_id":"toy-1.1.c","update_id":"toy-1/c/1","staleness":0,"discount":1.0,"late":false,"elapsed_s":3.0,"header":{"assignment_id":"toy-1.1.c","update_id":"toy-1/c/1","base_version":0,"examples":10,"steps":5,"a":5.0,"norm":0.0,"metrics":{"eval/loss":[0.0,1.0]},"timings":{"download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":3.0,"encode_s":0.0,"load_s":0.0,"commit_s":0.0},"parts":[{"name":"frame/0","length":143,"sha256":"aba9e4994b94bd4c814b62c6906bbfeac333b54e5199a2d984c56f1ca15e8e1a","offset":0}],"codec":"topk(0.1) > int8","counters":{},"residual_norm":0.0,"protocol":1,"transfer":{"pulled_at":1700000000.0,"began_at":1700000003.0,"arrived_at":1700000003.0,"sent_bytes":null,"received_bytes":null,"requests":0},"identity":"5a9770e05dcd50b1","type":"reply"},"ignored":0}');
INSERT INTO "journal" VALUES(13,'toy-1',1700000003.0,'UpdateAggregated','{"at":1700000003.0,"round":1,"update_id":"toy-1/c/1","aggregate_s":0.0004232299979776144}');
INSERT INTO "journal" VALUES(14,'toy-1',1700000003.0,'ModelStored','{"at":1700000003.0,"version":1,"digest":"7d0a395fe319744a01e95e3858a45979fbd77afae8d7b1b667f9598a200af987","file":"v000001.model","parts":[["full/0",2494,"193e366a711020f9d994df92170c991e8e62313a763fa42578bc1b5d41a7a004"]],"counters":{},"state":""}');
INSERT INTO "journal" VALUES(15,'toy-1',1700000003.0,'Evaluated','{"at":1700000003.0,"round":0,"version":0,"metrics":{"loss":0.0},"spread":{"loss":[0.0,0.0]},"examples":3,"clients":3,"best":true,"few":false,"reached":false,"payload_bytes":0,"models_sent":0,"sent_bytes":null,"received_bytes":null,"robust":{},"clipped":{},"units":{"eval/loss":0.1},"widths":{},"by_client":{}}');
INSERT INTO "journal" VALUES(16,'toy-1',1700000003.0,'RoundClosed','{"at":1700000003.0,"round":1,"reason":"all","version":1,"aggregated":["toy-1/a/1","toy-1/b/1","toy-1/c/1"],"dropped":[],"outstanding":[],"elapsed_s":3.0,"seconds":3.0,"metrics":{},"spent":{"wait_s":0.0,"download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":3.0,"encode_s":0.0,"load_s":0.0,"commit_s":0.0,"upload_s":0.0,"receive_s":0.0,"aggregate_s":0.0018232419970445335,"step_s":0.000310281990095973,"store_s":0.0002784340031212196},"slowest":"c","capped":{},"names":["eval/loss"],"ignored":0,"detail":"","chosen":[],"norms":[]}');
INSERT INTO "journal" VALUES(17,'toy-1',1700000003.0,'RunStatusChanged','{"at":1700000003.0,"status":"running","text":"round 2, step 2 of 4","exit_code":0}');
INSERT INTO "journal" VALUES(18,'toy-1',1700000003.0,'RoundOpened','{"at":1700000003.0,"round":2,"elapsed_s":3.0,"base_version":1,"base_digest":"7d0a395fe319744a01e95e3858a45979fbd77afae8d7b1b667f9598a200af987","added":[],"assignments":{"a":"toy-1.2.a","b":"toy-1.2.b","c":"toy-1.2.c"},"codec":"topk(0.1) > int8","deadline_s":30.0,"target_updates":3,"min_updates":2,"reasons":{},"references_from":0,"deadline_reason":[["planned",{}]],"codecs":{},"codec_reasons":{},"standings":{},"later":[],"sampling":[],"removed":[],"considered":3,"device_s":6.0}');
INSERT INTO "journal" VALUES(19,'toy-1',1700000003.0,'ClientSelected','{"at":1700000003.0,"round":2,"device":"a","assignment_id":"toy-1.2.a","payload_bytes":2494,"elapsed_s":0.0,"base_version":0,"deadline_s":0.0,"why":[],"instead_of":"","steps":0,"batch":0,"work_reason":[],"codec":"","codec_reason":[],"evaluates":true}');
INSERT INTO "journal" VALUES(20,'toy-1',1700000003.0,'ClientSelected','{"at":1700000003.0,"round":2,"device":"b","assignment_id":"toy-1.2.b","payload_bytes":2494,"elapsed_s":0.0,"base_version":0,"deadline_s":0.0,"why":[],"instead_of":"","steps":0,"batch":0,"work_reason":[],"codec":"","codec_reason":[],"evaluates":true}');
INSERT INTO "journal" VALUES(21,'toy-1',1700000003.0,'ClientSelected','{"at":1700000003.0,"round":2,"device":"c","assignment_id":"toy-1.2.c","payload_bytes":2494,"elapsed_s":0.0,"base_version":0,"deadline_s":0.0,"why":[],"instead_of":"","steps":0,"batch":0,"work_reason":[],"codec":"","codec_reason":[],"evaluates":true}');
INSERT INTO "journal" VALUES(22,'toy-1',1700000004.0,'UpdateAccepted','{"at":1700000004.0,"round":2,"assignment_round":2,"device":"a","assignment_id":"toy-1.2.a","update_id":"toy-1/a/2","staleness":0,"discount":1.0,"late":false,"elapsed_s":4.0,"header":{"assignment_id":"toy-1.2.a","update_id":"toy-1/a/2","base_version":1,"examples":10,"steps":5,"a":5.0,"norm":0.0,"metrics":{"eval/loss":[1.0,1.0]},"timings":{"download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":1.0,"encode_s":0.0,"load_s":0.0,"commit_s":0.0},"parts":[{"name":"frame/0","length":143,"sha256":"f58fece509b790e9a230f9e3e940d74bc9f668747628099bcd7ad63e5aa07e1e","offset":0}],"codec":"topk(0.1) > int8","counters":{},"residual_norm":0.0,"protocol":1,"transfer":{"pulled_at":1700000003.0,"began_at":1700000004.0,"arrived_at":1700000004.0,"sent_bytes":null,"received_bytes":null,"requests":0},"identity":"5a9770e05dcd50b1","type":"reply"},"ignored":0}');
CREATE TABLE logins (
	code_hash VARCHAR(64) NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	used_at DOUBLE, 
	CONSTRAINT pk_logins PRIMARY KEY (code_hash)
);
CREATE TABLE measures (
	device VARCHAR(63) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	work VARCHAR(64) NOT NULL, 
	samples JSON NOT NULL, 
	p50 DOUBLE, 
	p90 DOUBLE, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_measures PRIMARY KEY (device, kind, work)
);
INSERT INTO "measures" VALUES('a','down','','[[2494.0,0.0]]',NULL,NULL,1700000003.0);
INSERT INTO "measures" VALUES('a','encode','96db6763e414b64c/32','[[1.0,0.0]]',0.0,0.0,1700000003.0);
INSERT INTO "measures" VALUES('a','evaluate','96db6763e414b64c/32','[[1.0,0.0]]',0.0,0.0,1700000003.0);
INSERT INTO "measures" VALUES('a','pass','96db6763e414b64c/32','[[1.0,1.0]]',1.0,1.5,1700000003.0);
INSERT INTO "measures" VALUES('a','step','96db6763e414b64c/32','[[1.0,1.0]]',1.0,1.5,1700000003.0);
INSERT INTO "measures" VALUES('a','up','','[[143.0,0.0]]',NULL,NULL,1700000003.0);
INSERT INTO "measures" VALUES('b','down','','[[2494.0,0.0]]',NULL,NULL,1700000003.0);
INSERT INTO "measures" VALUES('b','encode','96db6763e414b64c/32','[[1.0,0.0]]',0.0,0.0,1700000003.0);
INSERT INTO "measures" VALUES('b','evaluate','96db6763e414b64c/32','[[1.0,0.0]]',0.0,0.0,1700000003.0);
INSERT INTO "measures" VALUES('b','pass','96db6763e414b64c/32','[[1.0,1.0]]',1.0,1.5,1700000003.0);
INSERT INTO "measures" VALUES('b','step','96db6763e414b64c/32','[[1.0,2.0]]',2.0,3.0,1700000003.0);
INSERT INTO "measures" VALUES('b','up','','[[143.0,0.0]]',NULL,NULL,1700000003.0);
INSERT INTO "measures" VALUES('c','down','','[[2494.0,0.0]]',NULL,NULL,1700000003.0);
INSERT INTO "measures" VALUES('c','encode','96db6763e414b64c/32','[[1.0,0.0]]',0.0,0.0,1700000003.0);
INSERT INTO "measures" VALUES('c','evaluate','96db6763e414b64c/32','[[1.0,0.0]]',0.0,0.0,1700000003.0);
INSERT INTO "measures" VALUES('c','pass','96db6763e414b64c/32','[[1.0,1.0]]',1.0,1.5,1700000003.0);
INSERT INTO "measures" VALUES('c','step','96db6763e414b64c/32','[[1.0,3.0]]',3.0,4.5,1700000003.0);
INSERT INTO "measures" VALUES('c','up','','[[143.0,0.0]]',NULL,NULL,1700000003.0);
CREATE TABLE phases (
	run_id VARCHAR(80) NOT NULL, 
	round INTEGER NOT NULL, 
	phase VARCHAR(16) NOT NULL, 
	closed_at DOUBLE NOT NULL, 
	elapsed_s DOUBLE NOT NULL, 
	received JSON NOT NULL, 
	dropped JSON NOT NULL, 
	CONSTRAINT pk_phases PRIMARY KEY (run_id, round, phase), 
	CONSTRAINT fk_phases_run_id FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
CREATE TABLE privacy_ledger (
	id INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	at DOUBLE NOT NULL, 
	population TEXT NOT NULL, 
	run_id VARCHAR(80) NOT NULL, 
	round INTEGER NOT NULL, 
	release TEXT NOT NULL, 
	count BIGINT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	who TEXT NOT NULL, 
	CONSTRAINT pk_privacy_ledger PRIMARY KEY (id)
);
CREATE TABLE privacy_participants (
	entry INTEGER NOT NULL, 
	device VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_privacy_participants PRIMARY KEY (entry, device), 
	CONSTRAINT fk_privacy_participants_entry FOREIGN KEY(entry) REFERENCES privacy_ledger (id)
);
CREATE TABLE privacy_spent (
	population TEXT NOT NULL, 
	device VARCHAR(64) NOT NULL, 
	release TEXT NOT NULL, 
	count BIGINT NOT NULL, 
	CONSTRAINT pk_privacy_spent PRIMARY KEY (population, device, release)
);
CREATE TABLE refusal_notes (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at DOUBLE NOT NULL, 
	kind TEXT NOT NULL, 
	address TEXT NOT NULL, 
	name TEXT NOT NULL, 
	why TEXT NOT NULL
);
CREATE TABLE rounds (
	run_id VARCHAR(80) NOT NULL, 
	round INTEGER NOT NULL, 
	opened_at DOUBLE NOT NULL, 
	closed_at DOUBLE, 
	reason TEXT NOT NULL, 
	base_version BIGINT NOT NULL, 
	version BIGINT, 
	deadline_s DOUBLE NOT NULL, 
	deadline_reason JSON DEFAULT '[]' NOT NULL, 
	sampling JSON DEFAULT '[]' NOT NULL, 
	codec TEXT NOT NULL, 
	codecs JSON DEFAULT '{}' NOT NULL, 
	codec_reasons JSON DEFAULT '{}' NOT NULL, 
	target_updates BIGINT NOT NULL, 
	min_updates BIGINT NOT NULL, 
	considered BIGINT NOT NULL, 
	selected JSON NOT NULL, 
	not_selected JSON NOT NULL, 
	aggregated JSON NOT NULL, 
	replied BIGINT DEFAULT '0' NOT NULL, 
	unanswered BIGINT DEFAULT '0' NOT NULL, 
	seconds DOUBLE, 
	metrics JSON NOT NULL, 
	spread JSON NOT NULL, 
	clipped JSON DEFAULT '{}' NOT NULL, 
	train_metrics JSON NOT NULL, 
	ignored BIGINT DEFAULT '0' NOT NULL, 
	spent JSON NOT NULL, 
	downtimes JSON DEFAULT '[]' NOT NULL, 
	missed_s DOUBLE DEFAULT '0' NOT NULL, 
	slowest TEXT NOT NULL, 
	secure_sum JSON DEFAULT '{}' NOT NULL, 
	detail TEXT DEFAULT '' NOT NULL, 
	explanation JSON DEFAULT '{}' NOT NULL, 
	until_s DOUBLE, 
	until_payload BIGINT, 
	until_wire BIGINT, 
	point INTEGER, 
	changed BIGINT NOT NULL, 
	payload_up BIGINT NOT NULL, 
	payload_down BIGINT NOT NULL, 
	wire_up BIGINT, 
	wire_down BIGINT, 
	aggregated_count BIGINT NOT NULL, 
	late BIGINT NOT NULL, 
	dropped BIGINT NOT NULL, 
	failed BIGINT NOT NULL, 
	CONSTRAINT pk_rounds PRIMARY KEY (run_id, round), 
	CONSTRAINT fk_rounds_run_id FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "rounds" VALUES('toy-1',1,1700000000.0,1700000003.0,'all',0,1,30.0,'[["planned",{}]]','[]','topk(0.1) > int8','{}','{}',3,2,3,'["a","b","c"]','{}','["toy-1/a/1","toy-1/b/1","toy-1/c/1"]',3,0,3.0,'{}','{}','{}','{}',0,'{"wait_s":0.0,"download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":3.0,"encode_s":0.0,"load_s":0.0,"commit_s":0.0,"upload_s":0.0,"receive_s":0.0,"aggregate_s":0.0018232419970445335,"step_s":0.000310281990095973,"store_s":0.0002784340031212196}','[]',0.0,'c','{}','','{"sentence":"Round 1 took 3.0 s: waited 3.0 s for c, which trained 5 steps in 3.0 s.","device":"c","stages":{"train":3.0},"waited_for":[],"requests":0,"rtt_s":null,"uncounted":{}}',3.0,7911,NULL,NULL,6,429,7482,NULL,NULL,3,0,0,0);
INSERT INTO "rounds" VALUES('toy-1',2,1700000003.0,NULL,'',1,NULL,30.0,'[["planned",{}]]','[]','topk(0.1) > int8','{}','{}',3,2,3,'["a","b","c"]','{}','[]',0,0,NULL,'{}','{}','{}','{}',0,'{}','[]',0.0,'','{}','','{}',NULL,NULL,NULL,NULL,8,143,7482,NULL,NULL,0,0,0,0);
CREATE TABLE runs (
	number INTEGER NOT NULL, 
	run_id VARCHAR(80) NOT NULL, 
	task VARCHAR(63) NOT NULL, 
	task_number BIGINT NOT NULL, 
	source VARCHAR(16) NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	status_text TEXT NOT NULL, 
	exit_code BIGINT NOT NULL, 
	"plan" JSON NOT NULL, 
	layout JSON NOT NULL, 
	size BIGINT NOT NULL, 
	task_report JSON NOT NULL, 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	rounds_total BIGINT NOT NULL, 
	rounds_closed BIGINT NOT NULL, 
	version BIGINT NOT NULL, 
	model_digest TEXT NOT NULL, 
	model_file TEXT NOT NULL, 
	best_version BIGINT, 
	best_value DOUBLE, 
	metrics JSON NOT NULL, 
	metrics0 JSON NOT NULL, 
	spread0 JSON NOT NULL, 
	clipped JSON DEFAULT '{}' NOT NULL, 
	dense_up BIGINT NOT NULL, 
	dense_down BIGINT NOT NULL, 
	notes JSON DEFAULT '[]' NOT NULL, 
	totals JSON DEFAULT '{}' NOT NULL, 
	identity VARCHAR(64) DEFAULT '' NOT NULL, 
	name TEXT DEFAULT '' NOT NULL, 
	tags JSON DEFAULT '[]' NOT NULL, 
	archived_at DOUBLE, 
	deleted_at DOUBLE, 
	deleted_by TEXT DEFAULT '' NOT NULL, 
	payload_up BIGINT NOT NULL, 
	payload_down BIGINT NOT NULL, 
	wire_up BIGINT, 
	wire_down BIGINT, 
	aggregated_count BIGINT NOT NULL, 
	late BIGINT NOT NULL, 
	dropped BIGINT NOT NULL, 
	failed BIGINT NOT NULL, 
	CONSTRAINT pk_runs PRIMARY KEY (number), 
	CONSTRAINT uq_runs_task_task_number UNIQUE (task, task_number), 
	CONSTRAINT uq_runs_run_id UNIQUE (run_id)
);
INSERT INTO "runs" VALUES(1,'toy-1','toy',1,'devices','running','round 2, step 2 of 4',0,'{"plan_version":1,"run":{"task":"toy","algorithm":"fedavg","alpha":0.1,"rounds":4,"seed":0,"priority":1.0,"init":"","keep":"last,best","target":null,"patience":null,"metric":"loss","evaluate":"clients","evaluate_wait_s":60.0,"evaluate_every":1,"fraction_evaluate":1.0,"eval_cohort":"selected","task_match":"layout"},"cohort":{"clients":"all","wait_for":3,"wait_s":0.0,"min_updates":0.5,"over_select":0.0,"deadline_s":30.0,"late":"aggregate","staleness_exponent":0.5,"max_staleness":5,"retry_limit":3,"mode":"sync","buffer":10,"max_concurrency":0,"selection":"uniform","max_weight":10.0,"requires":{"cores":0,"memory_gb":0.0,"mains":false,"unmetered":false}},"local":{"lr":1.0,"schedule":"constant","schedule_rounds":null,"lr_warmup":0.0,"lr_end":0.0,"steps":null,"epochs":null,"min_steps":1,"codec_threads":0,"batch":32,"accumulate":1,"optimizer":"sgd","momentum":0.0,"weight_decay":0.0,"clip_grad":null,"prox":0.0,"buffers":"average","personal_layers":[],"partial":false,"overlap":null,"durability":"round"},"uplink":{"codec":"topk(0.1) > int8","layers":{},"feedback":"auto","feedback_decay":1.0,"momentum":0.0,"warmup":null,"ladder":[]},"downlink":{"codec":"identity","feedback":"replica","full_every":0,"log_rounds":20},"server":{"lr":1.0,"schedule":"constant","schedule_rounds":null,"lr_warmup":0.0,"lr_end":0.0,"threads":0,"optimizer":"fedavg","momentum":null,"beta2":null,"tau":null,"reduce":"mean","max_norm":null},"secure":{"enabled":false,"adversary":"curious","max_corrupt":0.1,"max_dropout":0.1,"min_survivors":0,"graph":"auto","bits":8,"support":1.0,"rotate":true,"clip":"auto","weight_max":1,"metrics":{},"histograms":[],"post_quantum":false},"privacy":{"mode":"off","clip":null,"records":null,"clipping":"flat","adaptive":false,"noise_multiplier":null,"target_epsilon":null,"delta":1e-05,"budget":null,"max_participations":null,"sampling_rate":null,"mechanism":"auto","restart_every":null,"min_separation":1,"population":""}}','{"tensors":[["w",[30,20],"float32","trained"],["b",[20],"float32","trained"]],"aliases":[],"frozen":""}',620,'{"name":"toy","version":"","source_digest":"","layout_digest":"96db6763e414b64c6270643b7f2ddfcb1b20dedd4bcc248c88e6b49aea4cca04","codecs":[],"error":"","tensors":""}',1700000000.0,1700000000.0,NULL,4,1,1,'7d0a395fe319744a01e95e3858a45979fbd77afae8d7b1b667f9598a200af987','v000001.model',0,0.0,'{"loss":0.0}','{"loss":0.0}','{"loss":[0.0,0.0]}','{}',9920,14880,'[]','{"rounds":1,"seconds":3.0,"requests":0,"timed":0,"trips_s":0.0,"fewest":3,"most":3,"stages":{"train":3.0},"uncounted":{}}','5a9770e05dcd50b1','','[]',NULL,NULL,'',572,14964,NULL,NULL,3,0,0,0);
CREATE TABLE segments (
	run_id VARCHAR(80) NOT NULL, 
	last_seq BIGINT NOT NULL, 
	first_seq BIGINT NOT NULL, 
	body BLOB NOT NULL, 
	CONSTRAINT pk_segments PRIMARY KEY (run_id, last_seq), 
	CONSTRAINT fk_segments_run_id FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
CREATE TABLE sessions (
	token_hash VARCHAR(64) NOT NULL, 
	user VARCHAR(32) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	confirmed_at DOUBLE NOT NULL, 
	CONSTRAINT pk_sessions PRIMARY KEY (token_hash)
);
CREATE TABLE snapshots (
	run_id VARCHAR(80) NOT NULL, 
	seq BIGINT NOT NULL, 
	body TEXT NOT NULL, 
	CONSTRAINT pk_snapshots PRIMARY KEY (run_id), 
	CONSTRAINT fk_snapshots_run_id FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
CREATE TABLE tokens (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	user VARCHAR(32) NOT NULL, 
	secret_hash VARCHAR(64) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	run_id VARCHAR(80) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	used_at DOUBLE, 
	revoked_at DOUBLE, 
	CONSTRAINT pk_tokens PRIMARY KEY (id), 
	CONSTRAINT uq_tokens_secret_hash UNIQUE (secret_hash)
);
CREATE TABLE updates (
	run_id VARCHAR(80) NOT NULL, 
	assignment_id TEXT NOT NULL, 
	round INTEGER NOT NULL, 
	device VARCHAR(63) NOT NULL, 
	update_id TEXT NOT NULL, 
	outcome VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	late_reply BOOLEAN NOT NULL, 
	aggregated_round INTEGER, 
	staleness BIGINT NOT NULL, 
	selection_reason JSON DEFAULT '[]' NOT NULL, 
	instead_of VARCHAR(63) DEFAULT '' NOT NULL, 
	work_reason JSON DEFAULT '[]' NOT NULL, 
	weight_reason TEXT NOT NULL, 
	assigned_at DOUBLE, 
	delivered_at DOUBLE, 
	pulled_at DOUBLE, 
	began_at DOUBLE, 
	arrived_at DOUBLE, 
	failed_at DOUBLE, 
	download_s DOUBLE, 
	queue_s DOUBLE, 
	evaluate_s DOUBLE, 
	train_s DOUBLE, 
	encode_s DOUBLE, 
	load_s DOUBLE, 
	commit_s DOUBLE, 
	examples BIGINT NOT NULL, 
	steps BIGINT NOT NULL, 
	norm DOUBLE, 
	residual_norm DOUBLE, 
	residual_ratio DOUBLE, 
	state_lost TEXT DEFAULT '' NOT NULL, 
	requests BIGINT NOT NULL, 
	metrics JSON NOT NULL, 
	clipped JSON DEFAULT '[]' NOT NULL, 
	changed BIGINT DEFAULT '0' NOT NULL, 
	payload_up BIGINT NOT NULL, 
	payload_down BIGINT NOT NULL, 
	wire_up BIGINT, 
	wire_down BIGINT, 
	CONSTRAINT pk_updates PRIMARY KEY (run_id, assignment_id), 
	CONSTRAINT fk_updates_run_id FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "updates" VALUES('toy-1','toy-1.1.a',1,'a','toy-1/a/1','aggregated','',0,1,0,'[]','','[]','',1700000000.0,NULL,1700000000.0,1700000001.0,1700000001.0,NULL,0.0,0.0,0.0,1.0,0.0,0.0,0.0,10,5,0.0,0.0,NULL,'',0,'{"eval/loss":0.0}','[]',4,143,2494,NULL,NULL);
INSERT INTO "updates" VALUES('toy-1','toy-1.1.b',1,'b','toy-1/b/1','aggregated','',0,1,0,'[]','','[]','',1700000000.0,NULL,1700000000.0,1700000002.0,1700000002.0,NULL,0.0,0.0,0.0,2.0,0.0,0.0,0.0,10,5,0.0,0.0,NULL,'',0,'{"eval/loss":0.0}','[]',5,143,2494,NULL,NULL);
INSERT INTO "updates" VALUES('toy-1','toy-1.1.c',1,'c','toy-1/c/1','aggregated','',0,1,0,'[]','','[]','',1700000000.0,NULL,1700000000.0,1700000003.0,1700000003.0,NULL,0.0,0.0,0.0,3.0,0.0,0.0,0.0,10,5,0.0,0.0,NULL,'',0,'{"eval/loss":0.0}','[]',6,143,2494,NULL,NULL);
INSERT INTO "updates" VALUES('toy-1','toy-1.2.a',2,'a','toy-1/a/2','accepted','',0,NULL,0,'[]','','[]','',1700000003.0,NULL,1700000003.0,1700000004.0,1700000004.0,NULL,0.0,0.0,0.0,1.0,0.0,0.0,0.0,10,5,0.0,0.0,NULL,'',0,'{"eval/loss":1.0}','[]',8,143,2494,NULL,NULL);
INSERT INTO "updates" VALUES('toy-1','toy-1.2.b',2,'b','','selected','',0,NULL,0,'[]','','[]','',1700000003.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0,NULL,NULL,NULL,'',0,'{}','[]',7,0,2494,NULL,NULL);
INSERT INTO "updates" VALUES('toy-1','toy-1.2.c',2,'c','','selected','',0,NULL,0,'[]','','[]','',1700000003.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,0,NULL,NULL,NULL,'',0,'{}','[]',7,0,2494,NULL,NULL);
CREATE TABLE users (
	name VARCHAR(32) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	password_hash TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	who TEXT NOT NULL, 
	password_at DOUBLE NOT NULL, 
	login_at DOUBLE, 
	disabled_at DOUBLE, 
	CONSTRAINT pk_users PRIMARY KEY (name)
);
CREATE INDEX ix_alerts_closed_at ON alerts (closed_at);
CREATE INDEX ix_commands_answered_at ON commands (answered_at);
CREATE INDEX ix_device_actions_device ON device_actions (device);
CREATE INDEX ix_devices_change ON devices (change);
CREATE INDEX ix_privacy_ledger_population ON privacy_ledger (population);
CREATE INDEX ix_privacy_ledger_run_id_round ON privacy_ledger (run_id, round);
CREATE INDEX ix_privacy_spent_device ON privacy_spent (device);
CREATE INDEX ix_runs_status ON runs (status);
CREATE INDEX ix_sessions_user ON sessions (user);
CREATE INDEX ix_tokens_user ON tokens (user);
CREATE INDEX ix_clients_device ON clients (device);
CREATE INDEX ix_journal_run_id_seq ON journal (run_id, seq);
CREATE INDEX ix_privacy_participants_device ON privacy_participants (device);
CREATE INDEX ix_rounds_run_id_changed ON rounds (run_id, changed);
CREATE INDEX ix_rounds_run_id_point ON rounds (run_id, point);
CREATE INDEX ix_rounds_run_id_seconds_round ON rounds (run_id, seconds, round);
CREATE INDEX ix_updates_device_assigned_at ON updates (device, assigned_at);
CREATE INDEX ix_updates_run_id_aggregated_round ON updates (run_id, aggregated_round) WHERE aggregated_round <> round;
CREATE INDEX ix_updates_run_id_round ON updates (run_id, round);
CREATE INDEX ix_updates_run_id_update_id ON updates (run_id, update_id);
DELETE FROM "sqlite_sequence";
COMMIT;
