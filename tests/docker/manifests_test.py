#!/usr/bin/env python3
"""The manifests of docker/kubernetes and docker/compose.yaml.

    tests/docker/manifests_test.py [ROOT]

An MPIJob is checked against the operator's own definition, strictly: the cluster drops a field with a wrong name, this
refuses it. A Job's pods have the pods' part of that definition. compose.yaml is checked for what it promises.
"""

import copy
import pathlib
import sys
import unittest

import jsonschema
import yaml

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else __file__).resolve()
ROOT = ROOT if (ROOT / "docker").is_dir() else ROOT.parents[2]
KUBERNETES = ROOT / "docker/kubernetes"
FASTEST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def strict(schema):
    """The schema, where fields that it does not name are errors."""
    if isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" not in schema and not schema.get(
                "x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
        for value in schema.values():
            strict(value)
    elif isinstance(schema, list):
        for value in schema:
            strict(value)
    return schema


def load_schema():
    """The schema of an MPIJob, with metadata open."""
    text = (ROOT / "tests/docker/kubeflow.org_mpijobs.yaml").read_text()
    definition = yaml.load(text, FASTEST)["spec"]["versions"][0]
    assert definition["name"] == "v2beta1"
    schema = definition["schema"]["openAPIV3Schema"]
    return strict(schema)


SCHEMA = load_schema()
POD = SCHEMA["properties"]["spec"]["properties"]["mpiReplicaSpecs"]["additionalProperties"]["properties"]["template"]


def documents(name):
    return list(yaml.load_all((KUBERNETES / name).read_text(), FASTEST))


def job_of(name):
    return next(each for each in documents(name) if each["kind"] in ("MPIJob", "Job"))


class ManifestsTest(unittest.TestCase):
    def test_every_manifest_is_checked(self):
        self.assertEqual(sorted(path.name for path in KUBERNETES.iterdir()),
                         ["self-test.yaml", "train-cpu.yaml", "train-gpu.yaml"])

    def test_trainings_fit_the_operators_definition(self):
        for name in ("train-cpu.yaml", "train-gpu.yaml"):
            with self.subTest(name):
                jsonschema.validate(job_of(name), SCHEMA)

    def test_a_wrong_field_is_refused(self):
        for path, value in ((("spec", "sshAuthMountPaths"), "/root"), (("spec", "slotsPerWorker"), "one"),
                            (("spec", "mpiReplicaSpecs", "Worker", "template", "spec", "container"), [])):
            job = copy.deepcopy(job_of("train-cpu.yaml"))
            place = job
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            with self.subTest(path[-1]), self.assertRaises(jsonschema.ValidationError):
                jsonschema.validate(job, SCHEMA)

    def test_the_self_test_is_a_job_whose_pods_fit(self):
        job = job_of("self-test.yaml")
        self.assertEqual((job["apiVersion"], job["kind"]), ("batch/v1", "Job"))
        jsonschema.validate(job["spec"]["template"], POD)
        self.assertEqual(job["spec"]["template"]["spec"]["containers"][0]["args"], ["sluice", "doctor", "--self-test"])

    def test_trainings_survive_a_restart(self):
        for name in ("train-cpu.yaml", "train-gpu.yaml"):
            spec = job_of(name)["spec"]
            launcher, worker = spec["mpiReplicaSpecs"]["Launcher"], spec["mpiReplicaSpecs"]["Worker"]
            command = " ".join(launcher["template"]["spec"]["containers"][0]["args"])
            with self.subTest(name):
                self.assertTrue(command.startswith("mpirun -n "), command)
                self.assertIn("--resume auto", command)
                self.assertEqual((launcher["restartPolicy"], worker["restartPolicy"]), ("OnFailure", "OnFailure"))
                self.assertEqual(worker["template"]["spec"]["containers"][0]["args"], ["sshd"])
                self.assertEqual(spec["launcherCreationPolicy"], "WaitForWorkersReady")
                self.assertIn("readinessProbe", worker["template"]["spec"]["containers"][0])

    def test_ranks_have_a_slot_each(self):
        for name in ("train-cpu.yaml", "train-gpu.yaml"):
            spec = job_of(name)["spec"]
            words = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
            pods = spec["mpiReplicaSpecs"]["Worker"]["replicas"] + int(spec["runLauncherAsWorker"])
            value = {word: words[i + 1] for i, word in enumerate(words[:-1])}
            ranks = int(value["-n"])
            with self.subTest(name):
                self.assertEqual(ranks, pods * spec["slotsPerWorker"])
                self.assertEqual(ranks, int(value["--pipeline"]) * int(value.get("--replicas", 1)))

    def test_pods_need_no_rights_and_write_to_volumes_alone(self):
        pods = [job_of("self-test.yaml")["spec"]["template"]["spec"]]
        for name in ("train-cpu.yaml", "train-gpu.yaml"):
            replicas = job_of(name)["spec"]["mpiReplicaSpecs"]
            pods += [replicas[kind]["template"]["spec"] for kind in ("Launcher", "Worker")]
        for pod in pods:
            container = pod["containers"][0]
            self.assertTrue(pod["securityContext"]["runAsNonRoot"])
            self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"])
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            self.assertEqual(volumes[mounts["/dev/shm"]]["emptyDir"]["medium"], "Memory")
            self.assertIn("/tmp", mounts)
            self.assertIn("limits", container["resources"])


class ComposeTest(unittest.TestCase):
    def setUp(self):
        self.services = yaml.load((ROOT / "docker/compose.yaml").read_text(), FASTEST)["services"]

    def test_three_nodes_run_sshd_and_the_training_waits_for_them(self):
        nodes = {name for name, service in self.services.items() if service["command"] == "sshd"}
        self.assertEqual(nodes, {"node1", "node2", "node3"})
        self.assertEqual(set(self.services["train"]["depends_on"]), nodes)
        for node in nodes:
            self.assertIn(node, self.services["train"]["command"])
            self.assertEqual(self.services[node]["hostname"], node)

    def test_all_have_the_key_the_data_and_a_read_only_root(self):
        for name, service in self.services.items():
            with self.subTest(name):
                self.assertTrue(service["read_only"])
                self.assertTrue(any(":/etc/sluice/ssh:ro" in volume for volume in service["volumes"]))
                self.assertIn("work:/work", service["volumes"])


if __name__ == "__main__":
    unittest.main()
