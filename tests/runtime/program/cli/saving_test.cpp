// Saves, resumed runs and runs that are asked to stop, as a user meets them.
#include <fmt/core.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/checkpoint/save_lock.hpp"
#include "runtime/models/model_tensors.hpp"
#include "tests/runtime/program/cli/cli_tools.hpp"

namespace sluice::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// `text` with `value` for every '@'.
std::string fill(const std::string& text, const std::string& value) {
  std::string filled;
  for (const char c : text) c == '@' ? filled += value : filled += c;
  return filled;
}

class SavingTest : public CliTest {
 protected:
  // A text in which no two windows are alike.
  void SetUp() override {
    CliTest::SetUp();
    std::string text;
    for (int i = 0; i < 1000; ++i) text += std::to_string(i * i % 977) + ' ';
    write("text.txt", text);
  }
  std::string train(const std::string& more, const char* data = "text.txt") const {
    return std::string("train --device cpu --data ") + data +
           " --layers 2 --heads 2 --width 16 --context 16 " + more;
  }
  Outcome trained(const std::string& more) const {
    const Outcome outcome = sluice(train(more));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome;
  }
  std::string digest(const std::string& directory) const {
    const Outcome outcome = sluice("digest " + directory);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  }
  std::vector<std::string> steps_of(const std::string& directory) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path(directory))) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("step-")) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  void damage(const std::string& file) const {
    std::string bytes = read_file(path(file));
    bytes.at(bytes.size() - 5) ^= 1;
    write(file, bytes);
  }
  std::vector<int> metric_steps(const std::string& file) const {
    std::istringstream in(read_file(path(file)));
    std::vector<int> steps;
    for (std::string line; std::getline(in, line);) {
      steps.push_back(nlohmann::json::parse(line).at("step").get<int>());
    }
    return steps;
  }
};

// Between state.json and the name.
TEST_F(SavingTest, ARunKilledBeforeItsSaveHasANameGoesOnFromIt) {
  const auto saved = [&](int steps, const char* run) {
    return trained(
        fmt::format("--steps {} --save-every 2 --warmup 0 --learning-rate-decay constant "
                    "--resume auto --save {}",
                    steps, run));
  };
  const auto lose_name = [&](const std::string& step) {
    fs::rename(path("run/" + step), path(fmt::format("run/.{}.partial", step)));
  };
  saved(6, "whole");
  for (const int saves : {1, 2}) {  // the only one, and one after another
    fs::remove_all(path("run"));
    saved(2 * saves, "run");
    const std::string step = fmt::format("step-{:08d}", 2 * saves);
    lose_name(step);
    EXPECT_EQ(sluice("generate --tokens 3 --weights run").code, 0);
    EXPECT_THAT(saved(6, "run").out,
                HasSubstr(fmt::format("going on after step {} of 'run/{}'", 2 * saves, step)));
    EXPECT_EQ(digest("run"), digest("whole"));
  }
  lose_name("step-00000006");
  EXPECT_THAT(saved(6, "run").out,
              AllOf(HasSubstr("it is 'step-00000006' now"), HasSubstr("already complete")));
  EXPECT_EQ(steps_of("run").back(), "step-00000006");
}

TEST_F(SavingTest, TheNewestSavesStayAndEachCanBeRead) {
  const Outcome outcome = trained("--steps 6 --save run --save-every 1 --keep-every 3");
  EXPECT_THAT(steps_of("run"), ElementsAre("step-00000003", "step-00000005", "step-00000006"));
  EXPECT_THAT(outcome.out, HasSubstr("  weights            run/step-00000006\n"));
  EXPECT_THAT(outcome.out, HasSubstr("--resume run"));
  EXPECT_EQ(digest("run"), digest("run/step-00000006"));
  EXPECT_NE(digest("run"), digest("run/step-00000005"));
  for (const char* weights : {"run", "run/step-00000003"}) {
    EXPECT_EQ(sluice(std::string("generate --tokens 3 --weights ") + weights).code, 0);
  }
  const nlohmann::json state =
      nlohmann::json::parse(read_file(path("run/step-00000006/state.json")));
  EXPECT_THAT(state["options"].dump(), AllOf(HasSubstr("save-every"), Not(HasSubstr("dry-run"))));
}

TEST_F(SavingTest, SavesOfAnotherRunAreReplacedOnlyWhenAsked) {
  trained("--steps 2 --save run");
  const std::string before = digest("run");
  const Outcome refused = sluice(train("--steps 1 --save run"));
  expect_refusal(refused, 4, "'run'");
  EXPECT_THAT(refused.err, AllOf(HasSubstr("--resume auto"), HasSubstr("--overwrite")));
  EXPECT_EQ(digest("run"), before);
  trained("--steps 1 --save run --overwrite");
  EXPECT_THAT(steps_of("run"), ElementsAre("step-00000001"));
}

TEST_F(SavingTest, AResumedRunHasTheBitsOfOneThatWasNotCut) {
  trained("--steps 6 --save run --save-every 3");
  const std::string whole = digest("run");
  for (const char* how :
       {"--resume run", "--resume run/step-00000003", "--save run --resume auto"}) {
    fs::remove_all(path("run/step-00000006"));
    const Outcome outcome = sluice(std::string("train ") + how);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(lines_with(outcome.out, "going on after step 3 of 'run/step-00000003'"), 1);
    EXPECT_EQ(lines_with(outcome.out, "changed since"), 0) << outcome.out;
    EXPECT_EQ(digest("run"), whole) << how;
  }
  const Outcome other = mpirun(3, SLUICE_PROGRAM, "train --resume run/step-00000003 --save third");
  EXPECT_EQ(other.code, 0) << other.err;
  EXPECT_EQ(lines_with(other.out, "3 ranks: pipeline of 3 x 1 replica"), 1) << other.out;
  EXPECT_EQ(lines_with(other.out, "changed since step 3: save run -> third"), 1) << other.out;
  EXPECT_EQ(digest("third"), whole);
}

TEST_F(SavingTest, VirtualReplicasHaveTheSameBitsOnFewerRanks) {
  const auto job = [&](int ranks, const std::string& more) {
    const Outcome outcome = mpirun(
        ranks, SLUICE_PROGRAM,
        train("--warmup 0 --learning-rate-decay constant --micro-batches 3 --metrics metrics " +
              more));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  const auto validation = [&] {
    const std::string lines = read_file(path("metrics"));
    return lines.substr(lines.rfind("\"val_loss\""));
  };
  job(4, "--replicas 4 --steps 6 --save four");
  const std::string whole = digest("four"), loss = validation();
  EXPECT_EQ(lines_with(sluice("digest four").err, "computed with 4 virtual replicas"), 1);

  const std::string two = job(2, "--replicas 2 --virtual-replicas 4 --steps 6 --save two");
  EXPECT_EQ(lines_with(two, "pipeline of 1 x 4 virtual replicas on 2, schedule 1f1b, 3 micro-"), 1)
      << two;
  EXPECT_EQ(validation(), loss);
  EXPECT_EQ(digest("two"), whole);
  job(2, "--pipeline 2 --virtual-replicas 4 --steps 6 --save one");
  EXPECT_EQ(validation(), loss);
  EXPECT_EQ(digest("one"), whole);

  job(4, "--replicas 4 --steps 2 --save chain");
  EXPECT_EQ(lines_with(job(2, "--replicas 2 --steps 4 --save chain --resume auto"), "other bits"),
            0);
  job(1, "--replicas 1 --steps 6 --save chain --resume auto");
  EXPECT_EQ(validation(), loss);
  EXPECT_EQ(digest("chain"), whole);

  const std::string third = "--replicas 3 --resume four --save three --steps 7 --micro-batches 4 ";
  EXPECT_EQ(
      lines_with(job(3, third), "other bits from step 7 on: 3 virtual replicas, the save has 4"),
      1);
  expect_refusal(sluice(train(third + "--virtual-replicas 4")), 2, "option --virtual-replicas: 4");
}

TEST_F(SavingTest, AResumeOnAnotherProcessorIsSaid) {
  const std::string other = "env ONEDNN_MAX_CPU_ISA=SSE41 " SLUICE_PROGRAM;
  EXPECT_EQ(lines_with(trained("--steps 2 --save run").out, "arithmetic: "), 1);
  const Outcome resumed = shell(other + " train --resume run --steps 3");
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(lines_with(resumed.out, "changed since step 2: arithmetic: "), 1) << resumed.out;
  EXPECT_THAT(shell(other + " digest run").err,
              AllOf(HasSubstr("computed with "), HasSubstr(" (sse41"), HasSubstr("f32 rows")));

  const std::string both = train("--steps 4 --resume run --save mixed");
  const Outcome mixed = mpirun_beside(SLUICE_PROGRAM " " + both, other + " " + both);
  EXPECT_EQ(mixed.code, 0) << mixed.err;
  EXPECT_EQ(lines_with(mixed.out, "arithmetic of ranks 0: "), 1) << mixed.out;
  EXPECT_EQ(lines_with(mixed.out, "arithmetic of ranks 1: "), 1) << mixed.out;
  EXPECT_EQ(lines_with(sluice("digest mixed").err, "computed with "), 2);
}

TEST_F(SavingTest, OneCommandStartsGoesOnAndEnds) {
  for (const int ranks : {1, 2}) {
    const std::string save = "run" + std::to_string(ranks);
    const auto job = [&](const std::string& steps) {
      return mpirun(
          ranks, SLUICE_PROGRAM,
          fill(train("--warmup 0 --metrics @.jsonl --resume auto --save @ --steps "), save)
              .append(steps));
    };
    const Outcome first = job("2");
    EXPECT_EQ(first.code, 0) << first.err;
    EXPECT_EQ(lines_with(first.out, "going on after step"), 0);
    const Outcome second = job("4");
    EXPECT_EQ(second.code, 0) << second.err;
    EXPECT_EQ(lines_with(second.out, "going on after step 2 of '" + save + "/step-00000002'"), 1);
    EXPECT_THAT(metric_steps(save + ".jsonl"), ElementsAre(1, 2, 2, 3, 4, 4));
    const std::string before = digest(save);
    const Outcome third = job("4");
    EXPECT_EQ(third.code, 0) << third.err;
    EXPECT_EQ(third.out, "already complete: " + save + " has done all 4 steps\n");
    EXPECT_EQ(digest(save), before);
  }
  expect_refusal(sluice("train --resume run1 --steps 4"), 2, "choose at least 5");
}

TEST_F(SavingTest, ACompleteRunClearsWhatAKillLeftBeside) {
  const std::string again = "--steps 4 --save run --save-every 2 --resume auto";
  trained(again);
  const auto leave = [&](const char* name) {
    fs::copy(path("run/step-00000002"), path(std::string("run/") + name));
  };
  leave(".step-00000001.deleted");
  std::ofstream(path("run/latest.partial")) << "step";
  const std::string before = digest("run");
  trained(again + " --dry-run");
  EXPECT_TRUE(fs::exists(path("run/.step-00000001.deleted")));
  const Outcome cleared = trained(again);
  EXPECT_THAT(cleared.out, AllOf(HasSubstr("removed '.step-00000001.deleted', which a cut save"),
                                 HasSubstr("already complete: run has done all 4 steps\n")));
  EXPECT_FALSE(fs::exists(path("run/.step-00000001.deleted")));
  EXPECT_FALSE(fs::exists(path("run/latest.partial")));
  EXPECT_FALSE(fs::exists(path("run/lock")));
  EXPECT_EQ(digest("run"), before);

  if (const ::pid_t dead = ::fork(); dead == 0) {
    new SaveLock(path("run"));
    std::_Exit(0);
  } else {
    ::waitpid(dead, nullptr, 0);
  }
  write("run/stop", "");
  EXPECT_TRUE(fs::exists(path("run/lock")));
  EXPECT_THAT(trained(again).out, HasSubstr("already complete: run has done all 4 steps\n"));
  EXPECT_FALSE(fs::exists(path("run/lock")));
  EXPECT_FALSE(fs::exists(path("run/stop")));

  leave(".step-00000001.deleted");
  const SaveLock other(path("run"));  // a job that still saves there
  const Outcome kept = trained(again);
  EXPECT_THAT(kept.out, AllOf(HasSubstr("remains of cut saves stay in 'run': "),
                              HasSubstr("already complete: run has done all 4 steps\n")));
  EXPECT_TRUE(fs::exists(path("run/.step-00000001.deleted")));
}

TEST_F(SavingTest, AJobIsRefusedOnceForWhatWouldTrainAnotherFunction) {
  trained("--steps 2 --save run");
  const Outcome heads = mpirun(2, SLUICE_PROGRAM, "train --resume run --steps 4 --heads 4");
  expect_refusal(heads, 2, "heads 2 -> 4");
  write("other.txt", std::string(5000, 'b'));
  const std::string other = "train --resume run --steps 4 --data other.txt";
  expect_refusal(mpirun(2, SLUICE_PROGRAM, other), 2, "--change data");
  const Outcome changed = sluice(other + " --change data");
  EXPECT_EQ(changed.code, 0) << changed.err;
  EXPECT_EQ(lines_with(changed.out, "changed since step 2: tokens "), 1) << changed.out;
  fs::rename(path("text.txt"), path("moved.txt"));
  const std::string back = "train --resume run/step-00000002 --steps 4 --data moved.txt";
  expect_refusal(sluice(back), 4, "'step-00000004', which is newer than step 2");
  EXPECT_EQ(sluice(back + " --overwrite").code, 0);
}

TEST_F(SavingTest, ABrokenSaveIsPassedOverWhereTheOlderOneIsOfTheSameFunction) {
  trained("--steps 2 --save run");
  ASSERT_EQ(sluice("train --resume run --steps 4 --change seed --seed 9").code, 0);
  damage("run/step-00000004/model.safetensors");
  const Outcome refused = sluice("train --resume run --steps 6");
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_THAT(error_line(refused.err), AllOf(HasSubstr("seed 1 -> 9"), HasSubstr("step-00000002")));
  const Outcome named = sluice("train --resume run --steps 6 --change seed");
  EXPECT_EQ(named.code, 0) << named.err;
  EXPECT_EQ(lines_with(named.out, "passed over: "), 1) << named.out;
  EXPECT_THAT(named.out, HasSubstr("going on after step 2 of"));
}

TEST_F(SavingTest, ARequestInTheDirectoryStopsTheJobAfterItsStep) {
  trained("--steps 5 --warmup 0 --save whole");
  for (const int ranks : {1, 2}) {
    const std::string save = "run" + std::to_string(ranks);
    fs::create_directory(path(save));
    write(save + "/stop", "");
    const Outcome stopped =
        mpirun(ranks, SLUICE_PROGRAM, train("--steps 5 --warmup 0 --trace t.json --save " + save));
    EXPECT_EQ(stopped.code, 12) << stopped.out << stopped.err;
    EXPECT_EQ(lines_with(stopped.out, "stopped as asked after step 1; resume with --resume " +
                                          save + " (or auto)"),
              1)
        << stopped.out;
    EXPECT_EQ(lines_with(stopped.err, "sluice: error: "), 0) << stopped.err;
    EXPECT_FALSE(fs::exists(path(save + "/stop")));
    EXPECT_FALSE(fs::exists(path("t.json")));
    const Outcome resumed = mpirun(ranks, SLUICE_PROGRAM, "train --resume " + save);
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(digest(save), digest("whole"));
  }
}

TEST_F(SavingTest, ASignalStopsTheJobAfterItsStep) {
  for (const char* signal : {"USR1", "TERM", "INT", "HUP"}) {
    const std::string save = std::string("run") + signal;
    const std::string program =
        fill("sh -c '" SLUICE_PROGRAM " " + train("--steps 1000000 --save @ ") +
                 "& while ! [ -e @/options.conf ]; do sleep 0.05; done; sleep 0.5; kill -",
             save)
            .append(signal)
            .append(" $!; wait $!'");
    const Outcome outcome = shell(program);
    EXPECT_EQ(outcome.code, 12) << outcome.out << outcome.err;
    EXPECT_EQ(lines_with(outcome.out, "stopped as asked after step "), 1) << outcome.out;
    EXPECT_EQ(steps_of(save).size(), 1U);
    EXPECT_EQ(sluice("digest " + save).code, 0);
  }
}

TEST_F(SavingTest, AReaderOfTheOutputThatGoesAndAFileThatMayNotGrowEndNoProcess) {
  const Outcome piped = shell("sh -c '(" SLUICE_PROGRAM " " + train("--steps 4 --save run") +
                              "; echo $? >code) | true'");
  EXPECT_EQ(read_file(path("code")), "0\n") << piped.err;
  EXPECT_EQ(steps_of("run").size(), 1U);
  const Outcome limited =
      // MPI needs files of some MiB, the optimizer's state has 13.
      shell("sh -c 'ulimit -f 20000; " SLUICE_PROGRAM " " +
            train("--width 256 --steps 1 --warmup 0 --save limited'"));
  EXPECT_EQ(limited.code, 4) << limited.err;
  EXPECT_THAT(error_line(limited.err), HasSubstr("File too large"));
}

// While the job trains. `how`: a shell command, once there is a save.
TEST_F(SavingTest, DataThatChangesUnderAJobEndsIt) {
  const auto changed = [&](const std::string& options, const std::string& how) {
    write("live.txt", read_file(path("text.txt")));
    return shell("sh -c '" SLUICE_PROGRAM " " + train("--steps 1000000 --save run ", "live.txt") +
                 options + " & while ! [ -e run/latest ]; do sleep 0.05; done; " + how +
                 "; wait $!'");
  };
  const Outcome other =
      changed("--save-every 20", "printf zzzz | dd of=live.txt conv=notrunc status=none");
  EXPECT_EQ(other.code, 3) << other.out << other.err;
  EXPECT_THAT(error_line(other.err),
              HasSubstr("data file 'live.txt' has changed since the start: sha256 "));
  EXPECT_EQ(sluice("verify run").code, 0);
  const Outcome evaluated = sluice("evaluate --weights run --data live.txt --validation-samples 1");
  EXPECT_THAT(evaluated.err,
              HasSubstr("warning: 'live.txt' is not as the training read it: sha256"));
  write("live.txt", read_file(path("text.txt")));
  EXPECT_THAT(sluice("evaluate --weights run --validation-samples 1").err,
              Not(HasSubstr("warning")));
  fs::remove_all(path("run"));
  const Outcome shorter = changed("--save-minutes 0.001", "truncate -s 0 live.txt");
  EXPECT_THAT(error_line(shorter.err),
              AllOf(HasSubstr("SIGBUS on rank 0"), HasSubstr("; 'live.txt' has become shorter")));
}

TEST_F(SavingTest, WithoutSavingASignalStopsTheJobTooAndBothAreSaid) {
  const std::string wait = "while ! grep -sq grad_norm m.jsonl; do sleep 0.05; done; ";
  const Outcome outcome =
      shell("sh -c '" SLUICE_PROGRAM " " + train("--steps 1000000 --metrics m.jsonl ") + "& " +
            wait + "kill -INT $!; wait $!'");
  EXPECT_EQ(outcome.code, 12) << outcome.out << outcome.err;
  EXPECT_EQ(lines_with(outcome.out, "nothing is saved: give --save DIR"), 1) << outcome.out;
  EXPECT_EQ(lines_with(outcome.out, "stopped as asked after step "), 1) << outcome.out;
  EXPECT_EQ(lines_with(outcome.out, "; nothing is saved"), 1) << outcome.out;
  EXPECT_EQ(lines_with(outcome.out, "  training loss "), 1) << outcome.out;
}

TEST_F(SavingTest, MetricsHaveNoTornAndNoDoubledLine) {
  trained("--steps 4 --save run --save-every 2 --metrics m.jsonl");
  write("m.jsonl", read_file(path("m.jsonl")) + "{\"step\":5,\"lo");
  fs::remove_all(path("run/step-00000004"));
  const Outcome outcome = sluice("train --resume run");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(metric_steps("m.jsonl"), ElementsAre(1, 2, 3, 4, 4));
  fs::remove_all(path("run/step-00000004"));
  write("m.jsonl", "my notes\n");
  const Outcome refused = sluice("train --resume run");
  EXPECT_EQ(refused.code, 4);
  EXPECT_THAT(refused.err, HasSubstr("m.jsonl"));
  EXPECT_EQ(read_file(path("m.jsonl")), "my notes\n");
  EXPECT_EQ(sluice("train --resume run --metrics /dev/null").code, 0);
}

TEST_F(SavingTest, StepsThatAreNotFiniteAreSkippedUpToANumber) {
  const std::string wild =
      train("--steps 50 --warmup 0 --learning-rate 1e30 --clip 0 --save run --metrics m.jsonl ");
  const Outcome outcome = mpirun(2, SLUICE_PROGRAM, wild + "--on-nan skip --max-skips 3");
  EXPECT_EQ(outcome.code, 7) << outcome.out << outcome.err;
  EXPECT_THAT(error_line(outcome.err), HasSubstr("--max-skips 3"));
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
  EXPECT_EQ(lines_with(outcome.out, ": skipped, "), 3) << outcome.out;
  EXPECT_EQ(lines_with(read_file(path("m.jsonl")), "\"skipped\":true"), 4);
}

TEST_F(SavingTest, TheLastValidationIsBounded) {
  const std::string small =
      "train --device cpu --data text.txt --layers 1 --heads 1 --width 4 --context 1 --steps 2 "
      "--validation-share 0.5 ";
  const Outcome least = sluice(small);
  EXPECT_EQ(lines_with(least.out, " (32 of 1933 windows)"), 1) << least.out << least.err;
  const Outcome share = sluice(small + "--micro-batch-size 500");  // a twentieth of 1000
  EXPECT_EQ(lines_with(share.out, " (50 of 1933 windows)"), 1) << share.out << share.err;
  const Outcome all = sluice(small + "--validation-samples all");
  EXPECT_EQ(all.code, 0) << all.err;
  EXPECT_EQ(lines_with(all.out, " windows)"), 0) << all.out;
}

TEST_F(SavingTest, ADamagedSaveIsNeitherExportedNorDigested) {
  trained("--steps 2 --save run");
  EXPECT_EQ(sluice("export run sound").code, 0);
  EXPECT_THAT(sluice("verify sound").out, HasSubstr("'sound': 3 files are as SHA256SUMS says"));
  EXPECT_EQ(shell("sh -c 'cd sound && sha256sum --quiet -c SHA256SUMS'").code, 0);
  const std::string before = digest("sound");
  for (const char* file : {"run/step-00000002/model.safetensors", "sound/model.safetensors"}) {
    damage(file);
  }
  for (const char* command : {"export run out", "export run out --precision bf16", "digest run"}) {
    expect_refusal(sluice(command), 5, "step-00000002/model.safetensors' is damaged: bytes 0 to");
    EXPECT_FALSE(fs::exists(path("out")));
    const Outcome unverified = sluice(std::string(command) + " --verify off");
    EXPECT_EQ(unverified.code, 0) << unverified.err;
    fs::remove_all(path("out"));
  }
  expect_refusal(sluice("verify sound"), 5,
                 "'sound/model.safetensors' is damaged: expected sha256");
  EXPECT_NE(digest("sound"), before);
  write("sound/SHA256SUMS", "0  /etc/passwd\n");
  expect_refusal(sluice("verify sound"), 5,
                 "'sound/SHA256SUMS' is damaged: '0  /etc/passwd' is no");
  fs::remove(path("sound/SHA256SUMS"));
  EXPECT_THAT(sluice("verify sound").out, HasSubstr("'sound' has no hashes to compare with"));
}

TEST_F(SavingTest, AnExportIsReadAndNotResumed) {
  trained("--steps 2 --save run --save-weights-only");
  EXPECT_FALSE(fs::exists(path("run/step-00000002/optimizer.safetensors")));
  EXPECT_EQ(sluice("generate --tokens 3 --weights run").code, 0);
  expect_refusal(sluice("train --resume run --steps 4"), 5, "--save-weights-only");
}

}  // namespace
}  // namespace sluice::testing
