-- A database of version 1, as the first release wrote it (the dump of Python's sqlite3). Never changed.
PRAGMA application_id = 1752589428;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE attempts (
        job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
        number INTEGER NOT NULL,
        began REAL NOT NULL,
        ended REAL,
        first_step INTEGER,
        last_step INTEGER,
        code INTEGER,
        cause TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (job, number)
    ) WITHOUT ROWID;
INSERT INTO "attempts" VALUES(1,1,1764000010.0,1764000020.0,0,40,75,'rank 1 stalled');
INSERT INTO "attempts" VALUES(1,2,1764000030.0,NULL,NULL,NULL,NULL,'');
INSERT INTO "attempts" VALUES(2,1,1764000031.0,NULL,NULL,NULL,NULL,'');
CREATE TABLE dependencies (
        job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
        after INTEGER NOT NULL,
        PRIMARY KEY (job, after)
    ) WITHOUT ROWID;
INSERT INTO "dependencies" VALUES(4,1);
INSERT INTO "dependencies" VALUES(4,3);
CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        UNIQUE (kind, id)
    );
INSERT INTO "events" VALUES(4,'job','3');
INSERT INTO "events" VALUES(5,'job','4');
INSERT INTO "events" VALUES(6,'job','5');
INSERT INTO "events" VALUES(12,'job','1');
INSERT INTO "events" VALUES(15,'job','2');
INSERT INTO "events" VALUES(16,'waits','');
INSERT INTO "events" VALUES(17,'job','6');
INSERT INTO "events" VALUES(19,'hosts','');
INSERT INTO "events" VALUES(22,'settings','');
CREATE TABLE hosts (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        slots INTEGER NOT NULL,
        gpus TEXT NOT NULL,
        threads INTEGER NOT NULL,
        drained INTEGER NOT NULL DEFAULT 0,
        down TEXT NOT NULL DEFAULT ''
    );
INSERT INTO "hosts" VALUES(1,'h2',4,'[0, 1, 2, 3]',8,1,'');
INSERT INTO "hosts" VALUES(2,'h1',2,'[]',0,0,'ssh: connection refused');
CREATE TABLE idempotency_keys (
        owner TEXT NOT NULL,
        key TEXT NOT NULL,
        body BLOB NOT NULL,
        jobs TEXT NOT NULL,
        time REAL NOT NULL,
        PRIMARY KEY (owner, key)
    ) WITHOUT ROWID;
INSERT INTO "idempotency_keys" VALUES('ann','key 1',X'44136FA355B3678A1146AD16F7E8649E94FB4FC21FE77E8310C060F61CAAFF8A','[1]',1764000000.5);
CREATE TABLE jobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        priority INTEGER NOT NULL,
        submitted REAL NOT NULL,
        num_ranks INTEGER NOT NULL,
        min_ranks INTEGER NOT NULL,
        tensor INTEGER NOT NULL,
        gpus_per_rank INTEGER NOT NULL,
        output_dir TEXT NOT NULL,
        array INTEGER,
        code TEXT NOT NULL,
        time_limit REAL,
        max_retries INTEGER NOT NULL,
        retries INTEGER NOT NULL DEFAULT 0,
        stopping TEXT,
        reason TEXT NOT NULL DEFAULT '',
        estimated_start REAL,
        ended REAL
    );
INSERT INTO "jobs" VALUES(1,'small','ann','RUNNING',5,1764000000.5,2,2,1,0,'/runs/small-1',NULL,'abc',3600.0,3,1,NULL,'',NULL,NULL);
INSERT INTO "jobs" VALUES(2,'sweep','ben','STOPPING',0,1764000000.5,2,2,1,0,'/runs/sweep-2/1',2,'',NULL,3,0,'preempted','',NULL,NULL);
INSERT INTO "jobs" VALUES(3,'sweep','ben','QUEUED',0,1764000000.5,2,2,1,0,'/runs/sweep-2/2',2,'',NULL,3,0,NULL,'resources: needs 2 slots, 0 are free',1764000900.0,NULL);
INSERT INTO "jobs" VALUES(4,'after','ann','HELD',0,1764000000.5,2,2,1,0,'/runs/after-4',NULL,'',NULL,3,0,NULL,'',NULL,NULL);
INSERT INTO "jobs" VALUES(5,'big','ann','QUEUED',0,1764000000.5,4,2,2,1,'/runs/big-5',NULL,'',NULL,0,0,NULL,'',NULL,NULL);
INSERT INTO "jobs" VALUES(6,'gone','ann','CANCELLED',0,1764000000.5,2,2,1,0,'/runs/gone-6',NULL,'',NULL,3,0,NULL,'',NULL,1764000040.0);
CREATE TABLE placements (
        job INTEGER NOT NULL,
        number INTEGER NOT NULL,
        position INTEGER NOT NULL,
        host TEXT NOT NULL,
        ranks INTEGER NOT NULL,
        gpus TEXT NOT NULL,
        in_use INTEGER NOT NULL DEFAULT 1,
        PRIMARY KEY (job, number, position),
        FOREIGN KEY (job, number) REFERENCES attempts ON DELETE CASCADE
    ) WITHOUT ROWID;
INSERT INTO "placements" VALUES(1,1,0,'h2',2,'[0, 1]',0);
INSERT INTO "placements" VALUES(1,2,0,'h2',1,'[2]',1);
INSERT INTO "placements" VALUES(1,2,1,'h1',1,'[]',1);
INSERT INTO "placements" VALUES(2,1,0,'h1',1,'[]',1);
CREATE TABLE requests (
        job INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE,
        body TEXT NOT NULL
    );
INSERT INTO "requests" VALUES(1,'{"folder": "/home/ann", "words": ["task=language_model", "output_dir=/runs/small-1"], "launch": ["--timeline"], "config": {"task": "language_model", "optimizer.lr": 0.001, "data.files": ["a.txt", "\u00e9.txt"]}, "env_names": ["TOKEN"], "env_file": "/home/ann/.env"}');
INSERT INTO "requests" VALUES(2,'{"folder": "/home/ben", "words": ["task=language_model", "output_dir=/runs/sweep-2"], "launch": [], "config": {"task": "language_model", "optimizer.lr": 0.001, "data.files": ["a.txt", "\u00e9.txt"]}, "env_names": [], "env_file": null}');
INSERT INTO "requests" VALUES(3,'{"folder": "/home/ben", "words": ["task=language_model", "output_dir=/runs/sweep-2"], "launch": [], "config": {"task": "language_model", "optimizer.lr": 0.001, "data.files": ["a.txt", "\u00e9.txt"]}, "env_names": [], "env_file": null}');
INSERT INTO "requests" VALUES(4,'{"folder": "/home/ann", "words": ["task=language_model", "output_dir=/runs/after-4"], "launch": [], "config": {"task": "language_model", "optimizer.lr": 0.001, "data.files": ["a.txt", "\u00e9.txt"]}, "env_names": [], "env_file": null}');
INSERT INTO "requests" VALUES(5,'{"folder": "/home/ann", "words": ["task=language_model", "output_dir=/runs/big-5"], "launch": [], "config": {"task": "language_model", "optimizer.lr": 0.001, "data.files": ["a.txt", "\u00e9.txt"]}, "env_names": [], "env_file": null}');
INSERT INTO "requests" VALUES(6,'{"folder": "/home/ann", "words": ["task=language_model", "output_dir=/runs/gone-6"], "launch": [], "config": {"task": "language_model", "optimizer.lr": 0.001, "data.files": ["a.txt", "\u00e9.txt"]}, "env_names": [], "env_file": null}');
CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "settings" VALUES('limits','{"max_queued": null, "max_running": null, "max_slots": 8, "disk_bytes": null}');
INSERT INTO "settings" VALUES('limits of ben','{"max_queued": 5, "max_running": null, "max_slots": null, "disk_bytes": null}');
INSERT INTO "settings" VALUES('retention_days','30.0');
CREATE TABLE tags (
        job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
        tag TEXT NOT NULL,
        PRIMARY KEY (job, tag)
    ) WITHOUT ROWID;
INSERT INTO "tags" VALUES(1,'first');
INSERT INTO "tags" VALUES(1,'optimizer.lr=1e-3');
INSERT INTO "tags" VALUES(2,'seed=1');
INSERT INTO "tags" VALUES(3,'seed=2');
CREATE TABLE tokens (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        role TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        created REAL NOT NULL,
        last_used REAL,
        expires REAL
    );
INSERT INTO "tokens" VALUES(1,'laptop','ann','submit',X'8C6AC163E5AEB87D664E97216AAAEE1E34282F09B0504C79AE336061CDD293B0',1764000000.0,NULL,1765000000.0);
CREATE TABLE usage (
        owner TEXT PRIMARY KEY,
        slot_seconds REAL NOT NULL,
        at REAL NOT NULL
    ) WITHOUT ROWID;
INSERT INTO "usage" VALUES('ann',120.5,1764000050.0);
CREATE INDEX jobs_by_state ON jobs (state, id);
CREATE INDEX jobs_by_owner ON jobs (owner, state, id);
CREATE INDEX jobs_by_output ON jobs (output_dir, id);
CREATE INDEX jobs_by_end ON jobs (ended) WHERE ended IS NOT NULL;
CREATE INDEX tags_by_tag ON tags (tag, job);
CREATE INDEX dependencies_by_after ON dependencies (after);
CREATE UNIQUE INDEX one_open_attempt ON attempts (job) WHERE ended IS NULL;
CREATE INDEX placements_in_use ON placements (host) WHERE in_use;
CREATE INDEX idempotency_keys_by_time ON idempotency_keys (time);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',22);
INSERT INTO "sqlite_sequence" VALUES('jobs',6);
INSERT INTO "sqlite_sequence" VALUES('tokens',1);
COMMIT;
