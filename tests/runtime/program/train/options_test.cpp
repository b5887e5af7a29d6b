#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "runtime/data/batch_shape.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/train/offload_option.hpp"
#include "runtime/program/train/train_options.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

TrainOptions parse(std::vector<std::string> arguments) {
  arguments.emplace_back("--dry-run");
  return parse_train_options(arguments);
}

// The message of the usage error that these arguments end in.
std::string refusal(std::vector<std::string> arguments) {
  try {
    parse(std::move(arguments));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "accepted";
}

class ConfigFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() /
            ("sluice_options_test_" + std::to_string(::getpid()) + ".conf");
  }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_.string();
  }
  std::filesystem::path path_;
};

TEST(OptionsTest, DefaultsAreASmallModelOfBytes) {
  const TrainOptions options = parse({});
  EXPECT_EQ(options.model.layers, 4);
  EXPECT_EQ(options.model.width, 256);
  EXPECT_EQ(options.model.vocabulary, 256);
  EXPECT_TRUE(options.model.tied);
  EXPECT_EQ(options.pipeline.order.schedule, "1f1b");
  EXPECT_EQ(options.pipeline.shape.batch_size * options.model.context, 1024);
  EXPECT_EQ(options.steps, 2000U);
  EXPECT_EQ(options.pipeline.training.learning_rate.warmup, 100U);
  EXPECT_EQ(options.pipeline.training.learning_rate.steps, 2000U);
}

TEST(OptionsTest, ReadsEveryKindOfValue) {
  const TrainOptions options =
      parse({"--model", "llama", "--layers=3", "--seed", "18446744073709551615", "--learning-rate",
             "2.5e-4", "--untie", "--precision", "bf16", "--rank-order", "replica-first",
             "--dropout", "0.1", "--optimizer", "sgd", "--validation-samples", "7"});
  EXPECT_EQ(options.model.kind, TransformerKind::kLlama);
  EXPECT_EQ(options.model.layers, 3);
  EXPECT_EQ(options.pipeline.training.seed, 18446744073709551615U);
  EXPECT_EQ(options.pipeline.training.learning_rate.peak, 2.5e-4);
  EXPECT_FALSE(options.model.tied);
  EXPECT_EQ(options.model.precision, DType::kBf16);
  EXPECT_EQ(options.pipeline.shape.rank_order, RankOrder::kReplicaFirst);
  EXPECT_EQ(options.model.dropout, 0.1F);
  EXPECT_EQ(options.pipeline.training.optimizer.kind, OptimizerConfig::Kind::kSgd);
  EXPECT_EQ(options.validation_samples, 7);
}

TEST(OptionsTest, ABf16StreamNeedsBf16Matmuls) {
  EXPECT_EQ(parse({"--precision", "bf16"}).model.stream_precision, DType::kF32);
  EXPECT_EQ(parse({"--precision", "bf16", "--stream-precision", "bf16"}).model.stream_precision,
            DType::kBf16);
  for (const char* precision : {"fp32", "tf32"}) {
    EXPECT_THAT(refusal({"--precision", precision, "--stream-precision", "bf16"}),
                HasSubstr("--stream-precision bf16 with --precision f32; legal: f32, and bf16"));
  }
}

TEST(OptionsTest, ReplicasDivideWhatIsNamed) {
  EXPECT_EQ(parse({}).pipeline.shape.shard, ShardLevel::kNone);
  EXPECT_EQ(parse({"--shard", "none"}).pipeline.shape.shard, ShardLevel::kNone);
  const TrainOptions options = parse({"--replicas", "2", "--shard", "optimizer"});
  EXPECT_EQ(options.pipeline.shape.shard, ShardLevel::kOptimizer);
  EXPECT_THAT(describe_configuration(options.pipeline.expert.configuration),
              HasSubstr("  shard optimizer  "));
  const TrainOptions divided = parse({"--replicas", "2", "--shard", "gradients"});
  EXPECT_EQ(divided.pipeline.shape.shard, ShardLevel::kGradients);
  EXPECT_THAT(refusal({"--shard", "activations"}),
              AllOf(HasSubstr("--shard"), HasSubstr("'activations'"), HasSubstr("none, optimizer"),
                    HasSubstr("parameters")));
}

TEST(OptionsTest, ParametersAreGatheredWhenIsNamed) {
  const auto gather = [](const std::vector<std::string>& words) {
    return parse(words).pipeline.shape.shard_gather;
  };
  EXPECT_EQ(gather({"--shard", "parameters"}), ShardGather::kAuto);
  EXPECT_EQ(gather({"--shard", "parameters", "--shard-gather", "use"}), ShardGather::kUse);
  EXPECT_EQ(gather({"--shard", "parameters", "--shard-gather", "step"}), ShardGather::kStep);
}

TEST(OptionsTest, TheGroupThatDividesACopyIsNamed) {
  const auto group = [](const std::string& text) {
    return parse({"--shard", "parameters", "--replicas", "4", "--shard-group", text});
  };
  EXPECT_EQ(parse({}).pipeline.shape.shard_group, 0);
  EXPECT_EQ(group("all").pipeline.shape.shard_group, 0);
  EXPECT_EQ(group("host").pipeline.shape.shard_group, PipelineOptions::Shape::kWithinHosts);
  EXPECT_EQ(group("2").pipeline.shape.shard_group, 2);
  EXPECT_THAT(describe_configuration(group("host").pipeline.expert.configuration),
              HasSubstr("  shard-group host"));
  for (const char* bad : {"0", "-2", "2x", "hosts", ""}) {
    EXPECT_THAT(refusal({"--shard", "parameters", "--shard-group", bad}),
                AllOf(HasSubstr("--shard-group"), HasSubstr("legal are host, all, and numbers")));
  }
}

TEST(OptionsTest, RecomputesWhatIsNamed) {
  EXPECT_EQ(parse({}).model.recompute, Recompute::kNone);
  EXPECT_EQ(parse({"--recompute", "none"}).model.recompute, Recompute::kNone);
  EXPECT_EQ(parse({"--recompute", "attention"}).model.recompute, Recompute::kAttention);
  EXPECT_EQ(parse({"--recompute", "block"}).model.recompute, Recompute::kBlock);
  EXPECT_THAT(refusal({"--recompute", "full"}),
              AllOf(HasSubstr("'full'"), HasSubstr("none, attention, block")));
}

TEST(OptionsTest, RecomputesBlockByBlock) {
  constexpr auto kNone = Recompute::kNone, kAttention = Recompute::kAttention,
                 kBlock = Recompute::kBlock;
  const auto blocks = [](const std::string& text) {
    return parse({"--layers", "4", "--recompute", text}).model.recompute_blocks;
  };
  using Blocks = std::vector<Recompute>;
  EXPECT_EQ(blocks("block*4"), Blocks(4, kBlock));
  EXPECT_EQ(blocks("block,none"), (Blocks{kBlock, kNone, kNone, kNone}));
  EXPECT_EQ(blocks("block*2,attention,none*1"), (Blocks{kBlock, kBlock, kAttention, kNone}));
  EXPECT_EQ(blocks("attention*4,none"), Blocks(4, kAttention));
  EXPECT_EQ(blocks("block"), Blocks()) << "TransformerConfig::recompute has it";
  const TrainOptions options = parse({"--recompute", "block,attention*2,none"});
  EXPECT_EQ(value_of(options.checkpoint.options, "recompute"), "block*1,attention*2,none");

  const auto refused = [](const std::string& text) {
    return refusal({"--layers", "4", "--recompute", text});
  };
  EXPECT_THAT(refused("block*3"), AllOf(HasSubstr("'block*3' is for 3 blocks, --layers has 4"),
                                        HasSubstr("legal: block*3,none")));
  EXPECT_THAT(refused("block*4,none*1"), HasSubstr("for 5 blocks, --layers has 4"));
  for (const char* part :
       {"block*0", "block*", "block*-1", "block*x", "*2", "", "block*99999999"}) {
    EXPECT_THAT(refused(std::string("none,") + part),
                HasSubstr(std::string("'") + part + "' in 'none,"))
        << part;
  }
  EXPECT_THAT(refused(""), HasSubstr("none, attention, block"));
}

TEST(OptionsTest, OffloadsWhatIsNamedToWhereIsNamed) {
  using To = PipelineOptions::Offload::To;
  const auto parsed = [](const std::string& text) {
    return parse({"--offload", text}).pipeline.offload;
  };
  EXPECT_EQ(parsed("none").activations, To::kNowhere);
  EXPECT_EQ(parsed("activations:host").activations, To::kHost);
  const PipelineOptions::Offload one = parsed("optimizer:disk=a,b/c,");
  EXPECT_EQ(one.optimizer, To::kDisk);
  EXPECT_EQ(one.activations, To::kNowhere);
  EXPECT_EQ(one.directory, "a,b/c,");
  const PipelineOptions::Offload two = parsed("activations:host,optimizer:disk-cached=x");
  EXPECT_EQ(two.activations, To::kHost);
  EXPECT_EQ(two.optimizer, To::kCachedDisk);
  EXPECT_EQ(two.directory, "x");
  EXPECT_EQ(text_of(two), "activations:host,optimizer:disk-cached=x");
  EXPECT_EQ(text_of(parsed("optimizer:disk=y,activations:disk=y")), "activations,optimizer:disk=y");
  EXPECT_EQ(text_of(parsed("activations,optimizer:disk=y")), "activations,optimizer:disk=y");
  for (const auto& [text, why] : std::vector<std::pair<std::string, std::string>>{
           {"", "is not legal"},
           {"weights:disk=a", "is not legal"},
           {"optimizer:disk=", "is not legal"},
           {"optimizer:tape=a", "is not legal"},
           {"optimizer", "is not legal"},
           {"activations,optimizer,", "names no place"},
           {"activations:disk=a,optimizer", "names no place"},
           {"optimizer:disk=a,optimizer:disk=a", "names something twice"},
           {"activations,activations:disk=a", "names something twice"},
           {"activations:disk=a,optimizer:disk=b", "names two directories"}}) {
    EXPECT_THAT(refusal({"--offload", text}),
                AllOf(HasSubstr(fmt::format("--offload: '{}' {}", text, why)),
                      HasSubstr("legal are none")));
  }
}

TEST(OptionsTest, MemoryIsInBytesOrUnitsOf1024) {
  const auto memory = [](const char* text) {
    const TrainOptions options = parse({"--memory", text, "--recompute", "auto"});
    EXPECT_TRUE(options.recompute.automatic);
    return std::pair(options.pipeline.devices.memory,
                     value_of(options.checkpoint.options, "memory"));
  };
  EXPECT_EQ(memory("4097"), std::pair(std::size_t{4097}, std::string("4097")));
  EXPECT_EQ(memory("20G"), std::pair(std::size_t{20} << 30, std::string("20G")));
  EXPECT_EQ(memory("1.5K"), std::pair(std::size_t{1536}, std::string("1536")));
  EXPECT_EQ(memory("2048M"), std::pair(std::size_t{2} << 30, std::string("2G")));
  EXPECT_EQ(parse({}).pipeline.devices.memory, 0U);
  for (const char* text : {"0", "-1", "G", "20GB", "1e40", "nan", "20 G"}) {
    EXPECT_THAT(refusal({"--memory", text}),
                AllOf(HasSubstr("--memory: '" + std::string(text)), HasSubstr("1.5G")));
  }
  EXPECT_THAT(refusal({"--recompute", "auto"}), HasSubstr("give --memory SIZE as well"));
}

TEST(OptionsTest, TheLastOfRepeatedOptionsCounts) {
  EXPECT_EQ(parse({"--steps", "5", "--steps", "9"}).steps, 9U);
}

TEST(OptionsTest, RefusesASecondFileOfData) {
  EXPECT_THAT(refusal({"--data", "a.txt", "--seed", "1", "--data=b.txt"}),
              AllOf(HasSubstr("--data: 'b.txt' after 'a.txt'"), HasSubstr("legal is one")));
}

TEST(OptionsTest, RefusesNumbersThatAreNotWholeAndInRange) {
  for (const char* value :
       {"0", "-1", "4x", "", " 4", "4.0", "0x4", "2147483648", "99999999999999999999999", "four"}) {
    EXPECT_THAT(refusal({"--layers", value}),
                AllOf(HasSubstr("--layers"), HasSubstr("'" + std::string(value) + "'"),
                      HasSubstr("from 1 to 65536")))
        << value;
  }
  EXPECT_THAT(refusal({"--seed", "18446744073709551616"}), HasSubstr("--seed"));
  EXPECT_THAT(refusal({"--seed", "-1"}), HasSubstr("from 0 to 18446744073709551615"));
}

TEST(OptionsTest, RefusesRealNumbersOutsideTheirRange) {
  EXPECT_THAT(refusal({"--learning-rate", "0"}), HasSubstr("above 0"));
  EXPECT_THAT(refusal({"--learning-rate", "nan"}), HasSubstr("--learning-rate"));
  EXPECT_THAT(refusal({"--learning-rate", "inf"}), HasSubstr("--learning-rate"));
  EXPECT_THAT(refusal({"--dropout", "1"}), HasSubstr("from 0 to below 1"));
  EXPECT_THAT(refusal({"--clip", "-1"}), HasSubstr("from 0 up"));
  EXPECT_THAT(refusal({"--weight-decay", "1e"}), HasSubstr("'1e'"));
}

TEST(OptionsTest, WatchesUnlessToldNotTo) {
  const PipelineOptions::Watch usual = parse({"--save", "run"}).pipeline.watch;
  EXPECT_TRUE(usual.on && usual.ends_process);
  EXPECT_EQ(usual.timeout, 0);
  EXPECT_EQ(usual.action_timeout, 0);
  EXPECT_EQ(usual.directory, "run");
  const PipelineOptions::Watch given =
      parse({"--timeout", "2.5", "--action-timeout", "600", "--watchdog-ports", "46300-46399"})
          .pipeline.watch;
  EXPECT_EQ(given.timeout, 2.5);
  EXPECT_EQ(given.action_timeout, 600);
  EXPECT_EQ(given.first_port, 46300);
  EXPECT_EQ(given.last_port, 46399);
  EXPECT_FALSE(parse({"--watchdog", "off"}).pipeline.watch.on);
  EXPECT_EQ(parse({"--timeout", "auto", "--watchdog-ports", "7"}).pipeline.watch.last_port, 7);
}

TEST(OptionsTest, RefusesLimitsAndPortsThatCannotWork) {
  EXPECT_THAT(refusal({"--timeout", "0.5"}), AllOf(HasSubstr("--timeout"), HasSubstr("'auto'")));
  EXPECT_THAT(refusal({"--action-timeout", "-1"}), HasSubstr("'none'"));
  EXPECT_THAT(refusal({"--watchdog", "maybe"}), HasSubstr("on, off"));
  for (const char* ports : {"0", "x", "5-", "9-8", "1-65536", "1-2-3", "-5", "1 -2"}) {
    EXPECT_THAT(refusal({"--watchdog-ports", ports}), HasSubstr("no range of ports")) << ports;
  }
}

TEST(OptionsTest, RefusesUnknownNamesWithTheNearest) {
  EXPECT_THAT(refusal({"--layer", "3"}), AllOf(HasSubstr("'--layer'"), HasSubstr("'--layers'")));
  EXPECT_THAT(refusal({"--mikro-batches", "3"}), HasSubstr("'--micro-batches'"));
  EXPECT_THAT(refusal({"--qqqqqqqqqq"}),
              AllOf(HasSubstr("unknown option '--qqqqqqqqqq'"), Not(HasSubstr("did you mean"))));
  EXPECT_THAT(refusal({"--max-epochs", "3"}), Not(HasSubstr("did you mean")));
  EXPECT_THAT(refusal({"text.txt"}), HasSubstr("unexpected argument 'text.txt'"));
  EXPECT_THAT(refusal({"--schedule", "1b1f"}),
              AllOf(HasSubstr("1b1f"), HasSubstr("gpipe"), HasSubstr("did you mean '1f1b'")));
  EXPECT_THAT(refusal({"--schedule", "forward-only"}), HasSubstr("forward-only"));
  EXPECT_THAT(refusal({"--model", "gpt3"}), HasSubstr("gpt2, llama"));
}

TEST(OptionsTest, NamesTheOptionThatOtherProgramsCallSo) {
  const std::vector<std::pair<std::string, std::string>> names = {
      {"lr", "learning-rate"},
      {"pp", "pipeline"},
      {"dp", "replicas"},
      {"grad-accum", "micro-batches"},
      {"gradient-accumulation-steps", "micro-batches"},
      {"seq-len", "context"},
      {"seq-length", "context"},
      {"max-steps", "steps"},
      {"train-iters", "steps"},
      {"global-batch-size", "batch-size"},
      {"mbs", "micro-batch-size"},
      {"wd", "weight-decay"},
      {"fp16", "precision bf16"},
      {"activation-checkpointing", "recompute block"}};
  for (const auto& [name, here] : names) {
    std::string unknown = "unknown option '--";
    unknown.append(name).append("'; did you mean '--").append(here).append("'?");
    EXPECT_THAT(refusal({"--" + name, "1"}), HasSubstr(unknown));
  }
}

TEST(OptionsTest, RefusesAnOptionWithoutItsValueAndAFlagWithOne) {
  EXPECT_THAT(refusal({"--steps"}), HasSubstr("--steps"));
  EXPECT_THAT(refusal({"--steps", "--seed", "3"}), HasSubstr("--steps"));
  EXPECT_THAT(refusal({"--untie=3"}), HasSubstr("--untie"));
}

TEST(OptionsTest, RefusesNamesThatBoostWouldReplaceForEver) {
  for (const char* name : {"--%canonical_option%=", "--%option%", "--%prefix%=", "--%value%=x"}) {
    EXPECT_THAT(refusal({name}), HasSubstr("unknown option '--%"));
  }
}

TEST(OptionsTest, DoesNotGuessAbbreviations) {
  EXPECT_THAT(refusal({"--vocab", "256"}), HasSubstr("unknown option '--vocab'"));
}

TEST(OptionsTest, RefusesAWidthThatHeadsDoNotDivide) {
  EXPECT_THAT(refusal({"--width", "250", "--heads", "4"}),
              AllOf(HasSubstr("250"), HasSubstr("heads")));
}

TEST(OptionsTest, RefusesAWarmupLongerThanTheRun) {
  EXPECT_THAT(refusal({"--steps", "10", "--warmup", "11"}),
              AllOf(HasSubstr("--warmup"), HasSubstr("at most 10")));
  const TrainOptions automatic = parse({"--steps", "50"});
  EXPECT_EQ(automatic.pipeline.training.learning_rate.warmup, 5U);
  EXPECT_THAT(automatic.checkpoint.options, Contains(Pair("warmup", "auto")));
  EXPECT_THAT(automatic.checkpoint.options, Contains(Pair("chunks", "auto")));
  EXPECT_EQ(parse({"--warmup", "0"}).pipeline.training.learning_rate.warmup, 0U);
  const LearningRate constant =
      parse({"--steps", "50", "--learning-rate-decay", "constant"}).pipeline.training.learning_rate;
  EXPECT_EQ(constant.steps, 0U);
  EXPECT_EQ(constant.warmup, 5U);
}

TEST(OptionsTest, WantsDataUnlessDry) {
  try {
    (void)parse_train_options({});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("--data"));
  }
  EXPECT_EQ(parse_train_options({"--data", "text.txt"}).data, "text.txt");
}

TEST(OptionsTest, WhatOnlySavesUseIsRefusedWithoutSave) {
  for (const char* name : {"save-every", "keep", "keep-every"}) {
    EXPECT_THAT(refusal({std::string("--") + name, "3"}), HasSubstr("without --save DIR"));
  }
  EXPECT_THAT(refusal({"--overwrite"}), HasSubstr("without --save DIR"));
  EXPECT_EQ(parse({"--save", "run", "--keep", "3"}).checkpoint.keep, 3);
  EXPECT_EQ(parse({"--save", ""}).save, "");
}

TEST(OptionsTest, HelpNamesEveryOptionAndChecksNothing) {
  const TrainOptions options = parse_train_options({"--layers", "0", "--help"});
  for (const char* name : {"--layers", "--micro-batch-size", "--check-replicas", "--config"}) {
    EXPECT_THAT(options.help, HasSubstr(name));
  }
}

TEST(OptionsTest, AnOptionFileGivesBackEveryText) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     ("sluice_texts_" + std::to_string(::getpid()) + ".conf");
  const OptionValues texts = {{"data", "a#b"},           {"save", " edges "},
                              {"metrics", "\"quoted\""}, {"trace", "two\nlines"},
                              {"partition", "\\\"#"},    {"device", "a = b"},
                              {"config", "plain text"}};
  std::ofstream(path) << to_config_text(texts);
  EXPECT_EQ(read_option_file(path.string()), texts);
  std::ofstream(path) << "data = \"a # b\"  # comment\nsave=x # \"y\"\n# a = b\n";
  EXPECT_EQ(read_option_file(path.string()), (OptionValues{{"data", "a # b"}, {"save", "x"}}));
  for (const char* wrong :
       {"data = \"open", "data = \"a\" b", "data = \"\\x\"", "data # = b", "data"}) {
    std::ofstream(path) << wrong;
    expect_error(ErrorCode::kUsage, {"line 1"}, [&] { (void)read_option_file(path.string()); });
  }
  std::filesystem::remove(path);
  expect_error(ErrorCode::kUsage, {"/dev/zero", "more than"},
               [] { (void)read_option_file("/dev/zero"); });
}

TEST(OptionsTest, ResolvedValuesGiveTheSameOptionsAgain) {
  const TrainOptions first = parse_train_options(
      {"--dry-run", "--batch-size", "12", "--micro-batch-size", "5", "--learning-rate", "0.1",
       "--beta2", "0.95", "--untie", "--weight-decay", "0.1"});
  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     ("sluice_resolved_" + std::to_string(::getpid()) + ".conf");
  std::ofstream(path) << to_config_text(first.pipeline.expert.configuration);
  const TrainOptions second = parse_train_options({"--config", path.string()});
  std::filesystem::remove(path);
  EXPECT_EQ(first.pipeline.expert.configuration, second.pipeline.expert.configuration);
  EXPECT_THAT(first.pipeline.expert.configuration, Contains(Pair("micro-batches", "3")));
  EXPECT_THAT(first.pipeline.expert.configuration, Contains(Pair("learning-rate", "0.1")));
  EXPECT_THAT(first.pipeline.expert.configuration, Contains(Pair("beta2", "0.95")));
}

TEST_F(ConfigFileTest, TheCommandLineWins) {
  const std::string path = write("# a run\nsteps = 30\n\nlayers=2 # few\nuntie = true\n");
  const TrainOptions options = parse({"--config", path, "--steps", "7"});
  EXPECT_EQ(options.steps, 7U);
  EXPECT_EQ(options.model.layers, 2);
  EXPECT_FALSE(options.model.tied);
}

TEST_F(ConfigFileTest, RefusalsNameTheFileAndTheKey) {
  EXPECT_THAT(
      refusal({"--config", write("layer = 2\n")}),
      AllOf(HasSubstr(path_.string()), HasSubstr("unknown key 'layer'"), HasSubstr("'layers'")));
  EXPECT_THAT(refusal({"--config", write("lr = 2\n")}), HasSubstr("did you mean 'learning-rate'"));
  EXPECT_THAT(refusal({"--config", write("layers = two\n")}),
              AllOf(HasSubstr(path_.string()), HasSubstr("key layers"), HasSubstr("'two'")));
  EXPECT_THAT(refusal({"--config", write("nonsense\n")}),
              AllOf(HasSubstr(path_.string()), HasSubstr("nonsense")));
  EXPECT_THAT(refusal({"--config", write("[section]\n")}), HasSubstr("line 1 is '[section]'"));
  EXPECT_THAT(refusal({"--config", write("# none\n a %invalid_line% # b\n")}),
              HasSubstr("line 2 is 'a %invalid_line% # b'"));
  EXPECT_THAT(refusal({"--config", write("config = x\n")}), HasSubstr("unknown key 'config'"));
  EXPECT_THAT(refusal({"--config", write("lay\x1b\rers = 2\n")}), HasSubstr("key 'lay??ers'"));
  EXPECT_THAT(refusal({"--config", write(std::string(1'000'000, 'y') + " = 2\n")}),
              HasSubstr("yyy'; 'sluice train --help' lists all"));
  EXPECT_THAT(refusal({"--config", "/no/such/file"}), HasSubstr("/no/such/file"));
  EXPECT_THAT(refusal({"--config", "/tmp"}), HasSubstr("/tmp"));
}

TEST_F(ConfigFileTest, ABatchOptionOnTheCommandLineChangesASavedRun) {
  const std::string path =
      write("micro-batches = 4\nmicro-batch-size = 2\nbatch-size = 8\nreplicas = 1\n");
  EXPECT_EQ(parse({"--config", path}).pipeline.shape.micro_batches, 4);
  EXPECT_EQ(parse({"--config", path, "--batch-size", "12"}).pipeline.shape.micro_batches, 6);
  EXPECT_EQ(parse({"--config", path, "--micro-batches", "8"}).pipeline.shape.batch_size, 16);
  EXPECT_EQ(parse({"--config", path, "--replicas", "2"}).pipeline.shape.micro_batches, 2);
}

TEST(OptionsTest, VirtualReplicasCutABatchInPlaceOfReplicas) {
  EXPECT_EQ(parse({"--replicas", "3"}).pipeline.shape.virtual_replicas, 3);
  for (const char* replicas : {"1", "2", "4"}) {
    const TrainOptions options = parse({"--replicas", replicas, "--virtual-replicas", "4",
                                        "--micro-batches", "3", "--micro-batch-size", "2"});
    EXPECT_EQ(options.pipeline.shape.batch_size, 24);
    EXPECT_EQ(options.pipeline.shape.virtual_replicas, 4);
    EXPECT_THAT(options.checkpoint.options, Contains(Pair("virtual-replicas", "4")));
  }
  EXPECT_THAT(refusal({"--replicas", "2", "--virtual-replicas", "6"}),
              AllOf(HasSubstr("option --virtual-replicas: 6"), HasSubstr("here 4 or 8")));
  EXPECT_THAT(refusal({"--virtual-replicas", "4", "--batch-size", "3"}),
              HasSubstr("batch size 3 cannot serve 4 virtual replicas"));
  EXPECT_THAT(refusal({"--virtual-replicas", "4", "--all-reduce"}),
              AllOf(HasSubstr("option --all-reduce:"), HasSubstr("--virtual-replicas is 4")));
  EXPECT_THAT(refusal({"--virtual-replicas", "4", "--schedule", "gpipe-lifo"}),
              HasSubstr("option --schedule gpipe-lifo: its sums depend on the replicas"));
}

TEST_F(ConfigFileTest, VirtualReplicasOfAFileGiveWayToReplicasOnTheCommandLine) {
  const std::string path = write("replicas = 4\nvirtual-replicas = 4\nbatch-size = 12\n");
  EXPECT_EQ(parse({"--config", path, "--replicas", "2"}).pipeline.shape.virtual_replicas, 4);
  EXPECT_EQ(parse({"--config", path, "--replicas", "3"}).pipeline.shape.virtual_replicas, 3);
  EXPECT_THAT(refusal({"--config", path, "--replicas", "3", "--virtual-replicas", "4"}),
              HasSubstr("option --virtual-replicas: 4"));
}

TEST(OptionsTest, ShardsCutEveryLayerInPlaceOfTensorRanks) {
  const TrainOptions whole = parse({});
  EXPECT_EQ(whole.pipeline.shape.tensor, 1);
  EXPECT_EQ(whole.pipeline.shape.tensor_shards, 1);
  EXPECT_EQ(parse({"--tensor", "3"}).pipeline.shape.tensor_shards, 3);
  for (const char* tensor : {"1", "2", "4"}) {
    const TrainOptions options = parse({"--tensor", tensor, "--tensor-shards", "8"});
    EXPECT_EQ(options.pipeline.shape.tensor_shards, 8);
    EXPECT_THAT(options.checkpoint.options,
                AllOf(Contains(Pair("tensor", tensor)), Contains(Pair("tensor-shards", "8"))));
  }
  EXPECT_EQ(parse({"--tensor-shards", "6"}).pipeline.shape.tensor_shards, 6);
  EXPECT_THAT(refusal({"--tensor", "2", "--tensor-shards", "6"}),
              AllOf(HasSubstr("option --tensor-shards: 6 tensor shards with 2 tensor ranks"),
                    HasSubstr("here 4 or 8")));
  EXPECT_THAT(refusal({"--tensor", "0"}), HasSubstr("option --tensor: "));
  EXPECT_THAT(refusal({"--tensor-shards", "5000"}), HasSubstr("option --tensor-shards: "));
}

TEST(OptionsTest, WhatShardsCannotDoIsRefused) {
  for (const char* device : {"cpu", "auto", "cuda"}) {
    (void)parse({"--tensor", "2", "--device", device});
  }
  EXPECT_THAT(refusal({"--tensor-shards", "4", "--logit-chunks", "2"}),
              AllOf(HasSubstr("option --logit-chunks: 2 with"), HasSubstr("legal is 1")));
  (void)parse({"--tensor-shards", "1", "--logit-chunks", "2", "--device", "cuda"});
}

TEST_F(ConfigFileTest, ShardsOfAFileGiveWayToTensorRanksOnTheCommandLine) {
  const std::string path = write("tensor = 4\ntensor-shards = 8\n");
  EXPECT_EQ(parse({"--config", path}).pipeline.shape.tensor, 4);
  EXPECT_EQ(parse({"--config", path, "--tensor", "2"}).pipeline.shape.tensor_shards, 8);
  EXPECT_EQ(parse({"--config", path, "--tensor", "3"}).pipeline.shape.tensor_shards, 3);
}

// --- a schedule from a file ---

const std::string kTwoRanks = SLUICE_SCHEDULE_SAMPLES "/older_alphabet.csv";  // 2 micro-batches

TEST(ScheduleFileOptionTest, TheFileFixesDepthAndMicroBatches) {
  const TrainOptions options = parse({"--schedule-file", kTwoRanks, "--micro-batch-size", "3"});
  ASSERT_NE(options.pipeline.order.given, nullptr);
  EXPECT_EQ(options.pipeline.shape.pipeline, 2);
  EXPECT_EQ(options.pipeline.shape.micro_batches, 2);
  EXPECT_EQ(options.pipeline.shape.batch_size, 6);
}

TEST(ScheduleFileOptionTest, TheFileHasTheMicroBatchesOfAReplica) {
  const TrainOptions options = parse({"--schedule-file", kTwoRanks, "--virtual-replicas", "2"});
  EXPECT_EQ(options.pipeline.shape.micro_batches, 1);
  EXPECT_THAT(refusal({"--schedule-file", kTwoRanks, "--virtual-replicas", "4"}),
              HasSubstr("is for 2 micro-batches"));
}

TEST(ScheduleFileOptionTest, RefusalsNameTheOptionAndWhatIsLegal) {
  EXPECT_THAT(refusal({"--schedule-file", kTwoRanks, "--micro-batches", "3"}),
              AllOf(HasSubstr("--micro-batches: 3"), HasSubstr("legal is 2")));
  EXPECT_THAT(refusal({"--schedule-file", kTwoRanks, "--pipeline", "4"}),
              AllOf(HasSubstr("--pipeline: 4"), HasSubstr("legal is 2")));
  EXPECT_THAT(refusal({"--schedule-file", kTwoRanks, "--schedule", "gpipe"}),
              AllOf(HasSubstr("--schedule:"), HasSubstr("one of the two")));
  EXPECT_THAT(refusal({"--schedule-file", kTwoRanks, "--chunks", "2"}), HasSubstr("--chunks:"));
}

TEST(ScheduleFileOptionTest, ASearchPlacesTheLayersItself) {
  EXPECT_EQ(parse({"--schedule", "auto"}).pipeline.order.schedule, "auto");
  EXPECT_THAT(refusal({"--schedule", "auto", "--partition", "2,2"}), HasSubstr("--partition:"));
  EXPECT_EQ(parse({"--schedule", "auto", "--profile", "t.json"}).profile, "t.json");
  EXPECT_THAT(refusal({"--schedule", "zb-h1", "--profile", "t.json"}),
              HasSubstr("--profile: it has costs for --schedule auto, and the order is zb-h1"));
  EXPECT_THAT(refusal({"--schedule", "auto", "--cluster", "c.json"}),
              HasSubstr("--cluster: it has no times of layers; give --profile as well"));
}

TEST_F(ConfigFileTest, ASavedScheduleFileGivesWayToTheCommandLine) {
  const TrainOptions saved =
      parse_train_options({"--dry-run", "--schedule-file", kTwoRanks, "--batch-size", "6"});
  const std::string path = write(to_config_text(saved.pipeline.expert.configuration));
  EXPECT_NE(parse({"--config", path}).pipeline.order.given, nullptr);
  EXPECT_EQ(parse({"--config", path, "--replicas", "3"}).pipeline.shape.micro_batches, 2);
  const TrainOptions other = parse({"--config", path, "--schedule", "gpipe"});
  EXPECT_EQ(other.pipeline.order.given, nullptr);
  EXPECT_EQ(other.pipeline.order.schedule, "gpipe");
}

// --- batch size, micro-batch size, number of micro-batches ---

BatchShape resolve(std::int64_t batch, std::int64_t size, std::int64_t count,
                   std::int64_t replicas = 1) {
  return complete_batch_shape(
      {.batch_size = batch, .micro_batch_size = size, .micro_batches = count, .replicas = replicas},
      1000);
}

std::string batch_refusal(std::int64_t batch, std::int64_t size, std::int64_t count,
                          std::int64_t replicas = 1) {
  try {
    (void)resolve(batch, size, count, replicas);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "accepted";
}

TEST(BatchOptionsTest, AnyTwoGiveTheThird) {
  EXPECT_EQ(resolve(0, 3, 4, 2).batch_size, 24);
  EXPECT_EQ(resolve(24, 3, 0, 2).micro_batches, 4);
  EXPECT_EQ(resolve(24, 0, 4, 2).micro_batch_size, 3);
}

TEST(BatchOptionsTest, TheLastMicroBatchMayBeSmaller) {
  EXPECT_EQ(resolve(11, 4, 0).micro_batches, 3);
  EXPECT_EQ(resolve(11, 0, 3).micro_batch_size, 4);
  EXPECT_EQ(resolve(11, 4, 3).batch_size, 11);
}

TEST(BatchOptionsTest, DefaultsServeEveryReplicaAlike) {
  for (std::int64_t replicas = 1; replicas <= 9; ++replicas) {
    const BatchShape batch = resolve(0, 0, 0, replicas);
    EXPECT_GE(batch.batch_size, 4);
    EXPECT_EQ(batch.batch_size, replicas * batch.micro_batches * batch.micro_batch_size);
  }
}

TEST(BatchOptionsTest, EveryAcceptedShapeLeavesNoMicroBatchEmpty) {
  for (std::int64_t batch = 1; batch <= 12; ++batch) {
    for (std::int64_t count = 1; count <= 12; ++count) {
      for (std::int64_t replicas = 1; replicas <= 3; ++replicas) {
        BatchShape result;
        try {
          result = resolve(batch, 0, count, replicas);
        } catch (const Error&) {
          continue;
        }
        const std::int64_t smallest = batch / replicas;
        const std::int64_t largest = (batch + replicas - 1) / replicas;
        EXPECT_GT(smallest, (result.micro_batches - 1) * result.micro_batch_size);
        EXPECT_LE(largest, result.micro_batches * result.micro_batch_size);
      }
    }
  }
}

TEST(BatchOptionsTest, RefusalsGiveTheNearestLegalValues) {
  // Pieces of 2, 2, 1 and none.
  EXPECT_THAT(batch_refusal(5, 0, 4),
              HasSubstr("nearest legal: 3 or 5 micro-batches, or batch size 4"));
  EXPECT_THAT(batch_refusal(5, 0, 9), HasSubstr("nearest legal: 5 micro-batches"));
  // One replica gets 4 samples, the other 5.
  EXPECT_THAT(batch_refusal(9, 4, 0, 2), HasSubstr("batch size 8 or 10"));
  EXPECT_THAT(batch_refusal(3, 0, 0, 4), HasSubstr("nearest legal: batch size 4 or 3 replicas"));
  EXPECT_THAT(batch_refusal(20, 4, 4), HasSubstr("nearest legal batch size is 16"));
  EXPECT_THAT(batch_refusal(5000, 1, 0), HasSubstr("micro-batch size 5"));
}

TEST(BatchOptionsTest, RefusesProductsBeyondAnyNumber) {
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_THAT(batch_refusal(0, huge, 1000, huge), HasSubstr("1000 micro-batches"));
  EXPECT_THAT(batch_refusal(huge, huge, 1000, 2147483647), HasSubstr("batch size"));
  EXPECT_THAT(batch_refusal(0, huge, 0, huge), HasSubstr("batch"));
}

}  // namespace
}  // namespace sluice
